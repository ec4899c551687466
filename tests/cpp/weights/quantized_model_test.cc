// Quantised weights through writer, file and reader.
#include <functional>
#include <limits>
#include <random>

#include "cpp/weights/weights_test_util.h"
#include "weights/describe.h"
#include "weights/param_store.h"
#include "weights/quantize.h"
#include "weights/quantized_rows.h"

namespace allspark::testing {
namespace {

using weights::QuantFormat;

// The content of the three tensors of one quantised weight, before packing.
struct Parts {
  std::vector<float> values;
  std::vector<float> scales;
  std::vector<float> zeros;
};

Parts QuantizeRows(const std::vector<float>& rows, int64_t cols, const QuantFormat& format) {
  Parts parts;
  const auto groups = static_cast<size_t>(cols / format.group_size);
  std::vector<unsigned char> values(static_cast<size_t>(cols));
  std::vector<BFloat16> scales(groups);
  std::vector<unsigned char> zeros(groups);
  for (size_t at = 0; at < rows.size(); at += values.size()) {
    EXPECT_TRUE(weights::QuantizeRow(reinterpret_cast<const unsigned char*>(&rows[at]),
                                     DType::kFloat32, cols, format, values.data(), scales.data(),
                                     format.asymmetric ? zeros.data() : nullptr));
    parts.values.insert(parts.values.end(), values.begin(), values.end());
    for (const BFloat16 scale : scales) parts.scales.push_back(ToFloat(scale));
    parts.zeros.insert(parts.zeros.end(), zeros.begin(), zeros.end());
  }
  return parts;
}

Parts PartsOf(const proto::DecoderSpec& spec, const proto::WeightQuant& quant) {
  const RequiredTensor tensor = TensorNamed(spec, quant.tensor());
  const int64_t group = quant.group_size() == 0 ? Cols(tensor) : quant.group_size();
  return QuantizeRows(ValuesOf(tensor), Cols(tensor), {quant.bits(), quant.asymmetric(), group});
}

void ExpectStored(const ModelReader& reader, const std::string& name,
                  const std::vector<float>& values) {
  const RequiredTensor tensor = TensorNamed(reader.spec(), name);
  const Result<WeightView> view = reader.Find(name);
  ASSERT_TRUE(view.ok()) << view.status().ToString();
  EXPECT_EQ(view.value().dtype, tensor.dtype) << name;
  EXPECT_EQ(view.value().layout, tensor.layout) << name;
  const auto expected = PlainStored(tensor, values);
  ASSERT_EQ(view.value().bytes, static_cast<int64_t>(expected.size())) << name;
  EXPECT_EQ(std::memcmp(view.value().data, expected.data(), expected.size()), 0) << name;
}

void ExpectHoldsTheQuantizedFormula(const ModelReader& reader) {
  const proto::DecoderSpec& spec = reader.spec();
  std::vector<std::string> seen;
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    const Parts parts = PartsOf(spec, quant);
    ExpectStored(reader, quant.tensor(), parts.values);
    ExpectStored(reader, quant.tensor() + "_scale", parts.scales);
    if (quant.asymmetric()) ExpectStored(reader, quant.tensor() + "_zero", parts.zeros);
    for (const char* end : {"", "_scale", "_zero"}) seen.push_back(quant.tensor() + end);
  }
  for (const RequiredTensor& tensor : Required(spec)) {
    if (std::find(seen.begin(), seen.end(), tensor.name) != seen.end()) continue;
    ExpectStored(reader, tensor.name, ValuesOf(tensor));
  }
}

TEST(QuantizedModel, RequiresValuesScalesAndZeroPoints) {
  const auto list = Required(QuantSpec());
  auto expect = [&](const char* name, DType dtype, proto::Layout layout,
                    const std::vector<int64_t>& shape) {
    const auto found = std::find_if(list.begin(), list.end(),
                                    [&](const RequiredTensor& t) { return t.name == name; });
    ASSERT_NE(found, list.end()) << name;
    EXPECT_EQ(found->dtype, dtype) << name;
    EXPECT_EQ(found->layout, layout) << name;
    EXPECT_EQ(found->shape, shape) << name;
  };
  const proto::Layout panel = proto::PANEL64;
  const proto::Layout scale = proto::PANEL64_SCALE;
  expect("layers.0.qkv", DType::kUInt8, panel, {160, 64});
  expect("layers.0.qkv_scale", DType::kBFloat16, scale, {160, 1});
  expect("layers.0.qkv_bias", DType::kFloat32, proto::ROW_MAJOR, {160});
  expect("layers.0.o_scale", DType::kBFloat16, scale, {64, 1});
  expect("layers.0.gate_up", DType::kUInt4, panel, {320, 64});
  expect("layers.0.gate_up_scale", DType::kBFloat16, scale, {320, 2});
  expect("layers.0.down_zero", DType::kUInt8, scale, {64, 1});
  expect("layers.1.qkv", DType::kBFloat16, panel, {160, 64});
  expect("layers.1.down_scale", DType::kBFloat16, scale, {64, 5});
  expect("lm_head_zero", DType::kUInt8, scale, {37, 2});
  expect("embedding", DType::kUInt8, panel, {37, 64});  // Packed although it is only looked up.
  expect("embedding_zero", DType::kUInt8, scale, {37, 1});
  for (const char* name : {"layers.0.qkv_zero", "layers.0.gate_up_zero", "layers.1.qkv_scale"}) {
    for (const RequiredTensor& tensor : list) EXPECT_NE(tensor.name, name);
  }
  proto::DecoderSpec tied = SmallSpec(proto::COMPUTE_BFLOAT16);
  tied.add_weight_quant()->set_tensor("embedding");
  tied.mutable_weight_quant(0)->set_bits(8);
  tied.mutable_weight_quant(0)->set_quantize_activations(true);
  EXPECT_EQ(TensorNamed(tied, "embedding_scale").shape, (std::vector<int64_t>{5, 1}));
}

TEST(QuantizedModel, RefusesInconsistentSpecsByTensorValueAndBound) {
  using Q = proto::WeightQuant;
  struct Bad {
    std::function<void(proto::DecoderSpec&, Q&)> change;  // of the entry of layers.0.qkv
    std::vector<std::string> message;
  };
  using S = proto::DecoderSpec;
  const std::vector<Bad> bad = {
      {[](S&, Q& q) { q.set_bits(0); }, {"\"layers.0.qkv\"", "bits is 0", "4, 6 or 8"}},
      {[](S&, Q& q) { q.set_bits(16); }, {"bits is 16"}},
      {[](S&, Q& q) { q.set_group_size(-1); }, {"group_size is -1", "0, 16, 32, 64 or 128"}},
      {[](S&, Q& q) { q.set_group_size(256); }, {"group_size is 256"}},
      {[](S&, Q& q) { q.set_group_size(128); },
       {"\"layers.0.qkv\"", "64 input features", "multiple of group_size, 128"}},
      {[](S&, Q& q) { q.set_activation_group_size(48); },
       {"\"layers.0.qkv\"", "activation_group_size is 48", "0, 32, 64 or 128"}},
      {[](S&, Q& q) {
         q.set_quantize_activations(true);
         q.set_activation_group_size(128);
       },
       {"64 input features", "multiple of activation_group_size, 128"}},
      {[](S&, Q& q) {
         q.set_quantize_activations(false);
         q.set_activation_group_size(32);
       },
       {"activation_group_size is 32", "0 without quantize_activations"}},
      {[](S&, Q& q) {
         q.set_quantize_activations(true);
         q.set_group_size(32);
         q.set_reordered(true);
         q.set_activation_group_size(32);
       },
       {"activation_group_size is 32", "0 with reordered columns"}},
      {[](S&, Q& q) { q.set_bits(6), q.set_group_size(0); },
       {"group_size is 0", "16, 32, 64 or 128 with 6 bits"}},
      {[](S&, Q& q) { q.set_offset(true), q.set_group_size(0); }, {"group_size is 0", "offset"}},
      {[](S&, Q& q) { q.set_offset(true), q.set_asymmetric(true); },
       {"asymmetric is true", "false with 6 bits, offset"}},
      {[](S&, Q& q) { q.set_table("123"); }, {"table has 3 numbers", "16, or none"}},
      {[](S&, Q& q) { q.set_table(std::string(16, 1)), q.set_bits(8); },
       {"bits is 8", "4 with a table"}},
      {[](S&, Q& q) { q.set_float8(true), q.set_bits(4); }, {"bits is 4", "8 with float8"}},
      {[](S&, Q& q) { q.set_float8(true), q.set_bits(8), q.set_asymmetric(true); },
       {"asymmetric is true", "float8"}},
      {[](S&, Q& q) { q.set_float8(true), q.set_bits(8), q.set_offset(true); },
       {"offset is true", "table or float8"}},
      {[](S&, Q& q) {
         q.set_bits(8);
         q.set_asymmetric(false);
         q.set_float8(true);
         q.set_quantize_activations(true);
       },
       {"quantize_activations is true", "false with float8"}},
      {[](S&, Q& q) { q.set_group_size(0), q.set_scale_codes(true); },
       {"group_size is 0", "scale_codes"}},
      {[](S&, Q& q) { q.set_group_size(32), q.set_scale_codes(true); },
       {"64 input features", "multiple of the blocks of scale_codes, 256"}},
      {[](S&, Q& q) { q.set_half_scales(true), q.set_power_scales(true); },
       {"\"layers.0.qkv\"", "at most one of half_scales, power_scales and scale_codes"}},
      {[](S&, Q& q) {
         q.set_asymmetric(false);
         q.set_group_size(32);
         q.set_offset(true);
         q.set_power_scales(true);
       },
       {"offset is true", "false with power_scales"}},
      {[](S&, Q& q) { q.set_quantize_activations(true), q.set_activation_group_size(16); },
       {"activation_group_size is 16", "0, 32, 64 or 128"}},
      {[](S&, Q& q) { q.set_tensor("layers.2.qkv"); }, {"\"layers.2.qkv\"", "neither"}},
      {[](S&, Q& q) { q.set_tensor("layers.0.qkv_bias"); }, {"\"layers.0.qkv_bias\"", "neither"}},
      {[](S&, Q& q) { q.set_tensor("final_norm"); }, {"\"final_norm\"", "neither"}},
      {[](S&, Q& q) { q.set_tensor(""); }, {"\"\"", "neither"}},
      {[](S&, Q& q) { q.set_tensor("layers.0.o"); }, {"\"layers.0.o\"", "twice"}},
      {[](S& s, Q&) { s.mutable_weight_quant(7)->set_quantize_activations(true); },
       {"\"embedding\"", "quantize_activations is true"}},
      {[](S& s, Q&) { s.set_tie_embeddings(true); }, {"\"lm_head\"", "neither"}},
      {[](S& s, Q&) { s.set_intermediate_size(164); },
       {"\"layers.0.down\"", "164 input features", "multiple of 8 for 4 bits"}},
      {[](S& s, Q&) { s.set_hidden_size(70); }, {"70 input features", "multiple of 4 for 8 bits"}},
  };
  for (const Bad& item : bad) {
    proto::DecoderSpec spec = QuantSpec();
    item.change(spec, *spec.mutable_weight_quant(0));
    const auto list = RequiredTensors(spec);
    ASSERT_FALSE(list.ok()) << item.message[0];
    ExpectError(list.status(), StatusCode::kInvalidArgument, item.message);
  }
}

TEST(QuantizedModel, RoundTripOfEveryLayoutAndDtype) {
  ThreadPool pool(2);
  for (const auto compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
    for (const DType source : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const TempDir dir;
      const proto::DecoderSpec spec = QuantSpec(compute);
      const auto image = BuildModel(spec, source, &pool);
      auto from_image = ModelReader::OpenImage(image, &pool);
      ASSERT_TRUE(from_image.ok()) << from_image.status().ToString();
      EXPECT_EQ((*from_image)->file().format_version(), 2u);
      ExpectHoldsTheQuantizedFormula(**from_image);
      BuildModel(spec, source, &pool, dir / "m");
      auto from_files = ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", &pool);
      ASSERT_TRUE(from_files.ok()) << from_files.status().ToString();
      EXPECT_EQ(ReadFile(dir / "m.asgraph"), GraphOf(*image));
      EXPECT_EQ(ReadFile(dir / "m.asparam"), ParamOf(*image));
    }
  }
}

TEST(QuantizedModel, ATiedEmbeddingIsQuantisedOnce) {
  proto::DecoderSpec spec = QuantSpec();
  spec.set_tie_embeddings(true);
  spec.clear_weight_quant();
  spec.add_weight_quant()->set_tensor("embedding");
  spec.mutable_weight_quant(0)->set_bits(4);
  auto reader = ModelReader::OpenImage(BuildModel(spec), nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  ExpectHoldsTheQuantizedFormula(**reader);
  EXPECT_FALSE((*reader)->Find("lm_head").ok());
}

TEST(QuantizedModel, BytesDoNotDependOnThreadsOrParts) {
  proto::DecoderSpec spec = QuantSpec();
  spec.set_vocab_size(5000);
  spec.set_hidden_size(1152);  // The head takes several strips and checksum pieces.
  const auto whole = BuildModel(spec);
  auto opened = ModelReader::OpenImage(whole, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  ExpectHoldsTheQuantizedFormula(**opened);
  for (const bool to_files : {false, true}) {
    for (int threads = 1; threads <= 5; threads += 2) {
      ThreadPool pool(threads, false);
      std::mt19937 random(static_cast<unsigned>(threads));
      const TempDir dir;
      auto writer = ModelWriter::Create(spec, (*opened)->file().build(), to_files ? dir / "g" : "",
                                        to_files ? dir / "p" : "", &pool);
      ASSERT_TRUE(writer.ok());
      std::vector<std::tuple<RequiredTensor, int64_t, int64_t>> parts;
      for (const RequiredTensor& tensor : Required(spec)) {
        if (tensor.layout == proto::PANEL64_SCALE) continue;
        for (int64_t begin = 0; begin < Rows(tensor);) {
          const int64_t end = std::min(
              Rows(tensor), begin + 1 + static_cast<int64_t>(random() % (Rows(tensor) / 3 + 1)));
          parts.emplace_back(tensor, begin, end);
          begin = end;
        }
      }
      std::shuffle(parts.begin(), parts.end(), random);
      for (const auto& [tensor, begin, end] : parts) {
        const Status added = AddRows(**writer, tensor, begin, end);
        ASSERT_TRUE(added.ok()) << added.ToString();
      }
      auto image = (*writer)->Finish();
      ASSERT_TRUE(image.ok()) << image.status().ToString();
      EXPECT_EQ(to_files ? ReadFile(dir / "g") : GraphOf(*image.value()), GraphOf(*whole));
      EXPECT_TRUE((to_files ? ReadFile(dir / "p") : ParamOf(*image.value())) == ParamOf(*whole));
    }
  }
}

// Rows so long that a strip holds less than one panel.
TEST(QuantizedModel, LongRowsAreStoredInStripsOfParts) {
  constexpr int64_t kRows = 70;
  constexpr int64_t kCols = 1 << 17;
  std::vector<float> values(kRows * kCols);
  std::mt19937 random(1);
  for (float& w : values) w = static_cast<float>(static_cast<int>(random() >> 16) - 32768);
  const QuantFormat format{4, false, 128};
  const RequiredTensor tensors[] = {
      {"w", DType::kUInt4, proto::PANEL64, {kRows, kCols}},
      {"w_scale", DType::kBFloat16, proto::PANEL64_SCALE, {kRows, kCols / 128}}};
  const auto plan = weights::PlanFile({tensors[0], tensors[1]});
  ASSERT_TRUE(plan.ok());
  auto store = weights::CreateImageStore(plan->param_bytes);
  ASSERT_TRUE(store.ok());
  weights::TensorWriter quantised(tensors[0], plan->offsets[0], plan->bytes[0], store->get());
  weights::TensorWriter scales(tensors[1], plan->offsets[1], plan->bytes[1], store->get());
  ThreadPool pool(2);
  weights::PackBuffers buffers(2);
  const weights::RowSource source{reinterpret_cast<const unsigned char*>(values.data()),
                                  DType::kFloat32, kRows, kCols * 4};
  ASSERT_TRUE(weights::StoreQuantizedRows(tensors[0], format, {&quantised, &scales, nullptr}, 0,
                                          source, buffers, &pool)
                  .ok());
  const Parts parts = QuantizeRows(values, kCols, format);
  const auto expected = PlainStored(tensors[0], parts.values);
  const auto expected_scales = PlainStored(tensors[1], parts.scales);
  EXPECT_EQ(std::memcmp((*store)->Direct(plan->offsets[0]), expected.data(), expected.size()), 0);
  EXPECT_EQ(std::memcmp((*store)->Direct(plan->offsets[1]), expected_scales.data(),
                        expected_scales.size()),
            0);
}

// Adds one part of a quantised weight, in `dtype`.
Status AddPart(ModelWriter& writer, const RequiredTensor& tensor, const std::vector<float>& values,
               DType dtype, int64_t begin, int64_t end) {
  const std::vector<float> rows(values.begin() + begin * Cols(tensor),
                                values.begin() + end * Cols(tensor));
  const auto bytes = Encode(rows, dtype);
  return writer.AddTensor(tensor.name, begin,
                          ViewRows(bytes.data(), dtype, 2, end - begin, Cols(tensor)));
}

TEST(QuantizedModel, TakesWeightsThatAreQuantisedAlready) {
  const proto::DecoderSpec spec = QuantSpec();
  const auto by_floats = BuildModel(spec);
  for (const DType scales : {DType::kFloat32, DType::kBFloat16}) {
    auto opened = ModelReader::OpenImage(by_floats, nullptr);
    auto writer = ModelWriter::Create(spec, (*opened)->file().build(), "", "", nullptr);
    ASSERT_TRUE(writer.ok());
    std::vector<std::string> quantised;
    for (const proto::WeightQuant& quant : spec.weight_quant()) {
      const Parts parts = PartsOf(spec, quant);
      auto add = [&](const std::string& name, const std::vector<float>& values, DType dtype) {
        const RequiredTensor tensor = TensorNamed(spec, name);
        ASSERT_TRUE(AddPart(**writer, tensor, values, dtype, 5, Rows(tensor)).ok());
        ASSERT_TRUE(AddPart(**writer, tensor, values, dtype, 0, 5).ok());
      };
      add(quant.tensor() + "_scale", parts.scales, scales);
      add(quant.tensor(), parts.values, DType::kUInt8);
      if (quant.asymmetric()) add(quant.tensor() + "_zero", parts.zeros, DType::kUInt8);
      quantised.push_back(quant.tensor());
    }
    for (const RequiredTensor& tensor : Required(spec)) {
      if (tensor.layout == proto::PANEL64_SCALE ||
          std::find(quantised.begin(), quantised.end(), tensor.name) != quantised.end()) {
        continue;
      }
      ASSERT_TRUE(AddRows(**writer, tensor, 0, Rows(tensor)).ok());
    }
    auto image = (*writer)->Finish();
    ASSERT_TRUE(image.ok()) << image.status().ToString();
    EXPECT_EQ(GraphOf(**image), GraphOf(*by_floats));
    EXPECT_TRUE(ParamOf(**image) == ParamOf(*by_floats));
  }
}

TEST(QuantizedModel, OneWeightComesInOneWay) {
  const proto::DecoderSpec spec = QuantSpec();
  const RequiredTensor weight = TensorNamed(spec, "layers.0.o");
  const RequiredTensor scale = TensorNamed(spec, "layers.0.o_scale");
  const RequiredTensor zero = TensorNamed(spec, "layers.0.o_zero");
  const std::vector<float> ones(64 * 128, 1.0f);
  const auto invalid = StatusCode::kInvalidArgument;
  auto writer = ModelWriter::Create(spec, {}, "", "", nullptr);
  ASSERT_TRUE(AddRows(**writer, weight, 0, 10).ok());
  ExpectError(AddPart(**writer, weight, ones, DType::kUInt8, 10, 20), invalid,
              {"\"layers.0.o\"", "as floats to quantise", "either"});
  ExpectError(AddPart(**writer, scale, ones, DType::kFloat32, 10, 20), invalid,
              {"\"layers.0.o_scale\"", "rows of \"layers.0.o\"", "as floats"});
  ExpectError(AddRows(**writer, weight, 9, 12), invalid, {"added before"});
  ASSERT_TRUE(AddRows(**writer, weight, 10, 64).ok());

  writer = ModelWriter::Create(spec, {}, "", "", nullptr);
  ASSERT_TRUE(AddPart(**writer, zero, ones, DType::kUInt8, 0, 64).ok());
  ExpectError(AddRows(**writer, weight, 0, 64), invalid,
              {"\"layers.0.o\"", "as quantised values or scales", "either"});
  ASSERT_TRUE(AddPart(**writer, weight, ones, DType::kUInt8, 0, 64).ok());
  ExpectError((*writer)->Finish().status(), StatusCode::kFailedPrecondition,
              {"\"layers.0.o_scale\" rows [0, 64)"});
}

TEST(QuantizedModel, RefusesBadValuesAndTakesThemRepaired) {
  for (const bool to_files : {false, true}) {
    const TempDir dir;
    const proto::DecoderSpec spec = QuantSpec();
    auto writer = ModelWriter::Create(spec, {}, to_files ? dir / "g" : "",
                                      to_files ? dir / "p" : "", nullptr);
    ASSERT_TRUE(writer.ok());
    const auto invalid = StatusCode::kInvalidArgument;
    for (const RequiredTensor& tensor : Required(spec)) {
      if (tensor.layout == proto::PANEL64_SCALE) continue;
      std::vector<float> values = ValuesOf(tensor);
      const auto rank = static_cast<int32_t>(tensor.shape.size());
      const TensorView view =
          ViewRows(values.data(), DType::kFloat32, rank, Rows(tensor), Cols(tensor));
      const float right = std::exchange(values.back(), std::numeric_limits<float>::infinity());
      ExpectError((*writer)->AddTensor(tensor.name, 0, view), invalid,
                  {tensor.name, "row " + std::to_string(Rows(tensor) - 1), "is inf", "finite"});
      if (tensor.dtype == DType::kUInt4) {
        values.back() = -3e38f;
        ExpectError((*writer)->AddTensor(tensor.name, 0, view), invalid,
                    {"is -30000000", "beyond 2^127"});
      }
      values.back() = right;
      ASSERT_TRUE(AddRows(**writer, tensor, 0, 2).ok());
      ASSERT_TRUE(AddRows(**writer, tensor, 2, Rows(tensor)).ok());
    }
    auto image = (*writer)->Finish();
    ASSERT_TRUE(image.ok()) << image.status().ToString();
    auto reader = to_files ? ModelReader::OpenFiles(dir / "g", dir / "p", nullptr)
                           : ModelReader::OpenImage(image.value(), nullptr);
    ASSERT_TRUE(reader.ok()) << reader.status().ToString();
    ExpectHoldsTheQuantizedFormula(**reader);
  }
}

TEST(QuantizedModel, RefusesPartsOfTheWrongKind) {
  proto::DecoderSpec spec = QuantSpec();
  spec.mutable_weight_quant(2)->set_reordered(true);
  auto writer = ModelWriter::Create(spec, {}, "", "", nullptr);
  const auto invalid = StatusCode::kInvalidArgument;
  const std::vector<float> some(320 * 64, 16.0f);
  auto add = [&](const char* name, DType dtype) {
    const RequiredTensor tensor = TensorNamed(spec, name);
    const auto bytes = Encode(some, dtype);
    const auto rank = static_cast<int32_t>(tensor.shape.size());
    return (*writer)->AddTensor(name, 0,
                                ViewRows(bytes.data(), dtype, rank, Rows(tensor), Cols(tensor)));
  };
  ExpectError(add("layers.0.gate_up", DType::kUInt8), invalid,
              {"\"layers.0.gate_up\"", "row 0, column 0 is 16", "does not fit uint4"});
  ExpectError(add("layers.0.gate_up", DType::kInt8), invalid, {"value is int8", "uint8 values"});
  ExpectError(add("layers.0.gate_up_scale", DType::kUInt8), invalid,
              {"value is uint8", "float32, float16 or bfloat16"});
  ExpectError(add("layers.0.down_zero", DType::kFloat32), invalid,
              {"value is float32", "it must be uint8"});
  ExpectError(add("layers.0.gate_up_order", DType::kFloat32), invalid,
              {"value is float32", "it must be int32"});
  ExpectError(add("layers.0.down_zero", DType::kInt32), invalid, {"value is int32"});
  ExpectError(add("layers.1.qkv", DType::kUInt8), invalid, {"value is uint8", "float32, float16"});
  ExpectError(add("final_norm", DType::kUInt8), invalid, {"value is uint8"});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> scales(640, nan);
  ExpectError((*writer)->AddTensor("layers.0.gate_up_scale", 0,
                                   ViewRows(scales.data(), DType::kFloat32, 2, 320, 2)),
              invalid, {"\"layers.0.gate_up_scale\"", "is nan", "finite"});
  proto::DecoderSpec power = QuantSpec();
  power.mutable_weight_quant(0)->set_power_scales(true);
  power.mutable_weight_quant(0)->set_group_size(32);
  auto power_writer = ModelWriter::Create(power, {}, "", "", nullptr);
  ASSERT_TRUE(power_writer.ok()) << power_writer.status().ToString();
  const RequiredTensor scale = TensorNamed(power, "layers.0.qkv_scale");
  const std::vector<unsigned char> infinite(static_cast<size_t>(Rows(scale) * Cols(scale)), 255);
  ExpectError(
      (*power_writer)
          ->AddTensor(scale.name, 0,
                      ViewRows(infinite.data(), DType::kUInt8, 2, Rows(scale), Cols(scale))),
      invalid, {"\"layers.0.qkv_scale\"", "is 255", "it must be at most 254"});
  // None of these calls has fixed the way in which the weight is added.
  ASSERT_TRUE(
      AddRows(**writer, TensorNamed(spec, "layers.0.gate_up"), 0, 320, DType::kBFloat16).ok());
}

TEST(QuantizedModel, IsDescribed) {
  auto reader = ModelReader::OpenImage(BuildModel(QuantSpec()), nullptr);
  ASSERT_TRUE(reader.ok());
  const std::string text = DescribeModel(**reader);
  for (const char* part :
       {"format_version: 2", "weight_quant layers.0.qkv: bits 8 group_size 0 symmetric, int8 act",
        "weight_quant lm_head: bits 4 group_size 32 asymmetric\n",
        "tensor layers.0.gate_up: uint4 [320, 64] panel64 offset ",
        "tensor layers.0.gate_up_scale: bfloat16 [320, 2] panel64_scale offset "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(QuantizedModel, DamageIsFoundAndForgeriesAreNamed) {
  const auto image = BuildModel(QuantSpec());
  const std::string graph = GraphOf(*image);
  const std::string param = ParamOf(*image);
  proto::ModelFile decoded;
  ASSERT_TRUE(weights::DecodeGraph(graph, &decoded).ok());
  auto open = [](const std::string& g, const std::string& p) {
    return ModelReader::OpenImage(std::make_shared<FakeImage>(g, p), nullptr).status();
  };
  for (const proto::TensorRecord& record : decoded.tensors()) {
    for (const uint64_t at : {uint64_t{0}, record.bytes() / 2, record.bytes() - 1}) {
      std::string damaged = param;
      damaged[record.offset() + at] ^= 1;
      ExpectError(open(graph, damaged), StatusCode::kDataLoss, {"\"" + record.name() + "\""});
    }
  }
  using F = proto::ModelFile;
  auto tensor = [](F& file, const std::string& name) {
    for (proto::TensorRecord& record : *file.mutable_tensors()) {
      if (record.name() == name) return &record;
    }
    throw std::runtime_error(name);
  };
  const std::vector<std::pair<std::function<void(F&)>, std::vector<std::string>>> forgeries = {
      {[&](F& f) { tensor(f, "lm_head")->set_dtype(10); },
       {"\"lm_head\"", "is uint8; the spec requires uint4"}},
      {[&](F& f) { tensor(f, "lm_head_scale")->set_layout(proto::PANEL64); },
       {"\"lm_head_scale\"", "layout 1", "requires 2"}},
      {[&](F& f) { tensor(f, "lm_head_scale")->set_shape(1, 1); }, {"shape [37, 1]", "[37, 2]"}},
      {[&](F& f) { tensor(f, "lm_head")->set_bytes(4096); }, {"takes 4096", "require 2048"}},
      {[&](F& f) { tensor(f, "lm_head_zero")->set_name("x"); }, {"\"x\"", "not required"}},
      {[](F& f) { f.mutable_spec()->mutable_weight_quant(0)->set_bits(4); },
       {"\"layers.0.qkv\"", "is uint8; the spec requires uint4"}},
      {[](F& f) { f.mutable_spec()->mutable_weight_quant(0)->set_bits(5); },
       {"spec: weight_quant of \"layers.0.qkv\": bits is 5"}},
      {[](F& f) { f.mutable_spec()->mutable_weight_quant(0)->set_group_size(32); }, {"[160, 2]"}},
      {[](F& f) { f.mutable_spec()->mutable_weight_quant(0)->set_asymmetric(true); },
       {"\"layers.0.qkv_zero\" is missing"}},
      {[](F& f) { f.mutable_spec()->clear_weight_quant(); }, {"the spec requires bfloat16"}},
      {[](F& f) { *f.mutable_spec()->add_weight_quant() = f.spec().weight_quant(2); }, {"twice"}},
  };
  for (const auto& [change, message] : forgeries) {
    proto::ModelFile file = decoded;
    change(file);
    ExpectError(open(weights::EncodeGraph(file), param), StatusCode::kDataLoss, message);
  }
}

// A reader of version 1 would take the file for one that is not quantised.
TEST(QuantizedModel, NeedsVersion2) {
  const auto image = BuildModel(QuantSpec());
  proto::ModelFile file;
  ASSERT_TRUE(weights::DecodeGraph(GraphOf(*image), &file).ok());
  EXPECT_EQ(file.format_version(), 2u);
  file.set_format_version(1);
  std::string param = ParamOf(*image);
  const auto header = weights::EncodeParamHeader({1, 0, file.file_id(), file.param_bytes()});
  std::memcpy(param.data(), header.data(), header.size());
  ExpectError(ModelReader::OpenImage(std::make_shared<FakeImage>(weights::EncodeGraph(file), param),
                                     nullptr)
                  .status(),
              StatusCode::kDataLoss, {"its fields need format 2", "has format 1"});
  proto::ModelFile plain;
  ASSERT_TRUE(weights::DecodeGraph(GraphOf(*BuildModel(SmallSpec())), &plain).ok());
  EXPECT_EQ(plain.format_version(), 1u);
}

TEST(QuantizedModel, TooManyEntriesAreRefusedUnparsed) {
  proto::ModelFile file;
  file.set_format_version(2);
  for (int i = 0; i < 33000; ++i) file.mutable_spec()->add_weight_quant();
  proto::ModelFile parsed;
  ExpectError(weights::DecodeGraph(weights::EncodeGraph(file), &parsed), StatusCode::kDataLoss,
              {"more than 32768 weight_quant entries"});
}

TEST(QuantizedModel, TheLargestLegalSpecFitsTheLimits) {
  proto::DecoderSpec spec = OddSpec(proto::COMPUTE_FLOAT32);
  spec.clear_layer_window();
  spec.set_num_layers(4096);
  spec.set_hidden_size(32);
  spec.set_head_dim(32);
  spec.set_intermediate_size(32);
  auto add = [&](const std::string& tensor) {
    proto::WeightQuant* quant = spec.add_weight_quant();
    quant->set_tensor(tensor);
    quant->set_bits(4);
    quant->set_asymmetric(true);
  };
  for (int layer = 0; layer < 4096; ++layer) {
    for (const char* name : {"qkv", "o", "gate_up", "down"}) {
      add("layers." + std::to_string(layer) + "." + name);
    }
  }
  add("embedding");
  add("lm_head");
  EXPECT_LE(spec.weight_quant_size(), weights::kMaxWeightQuants);
  const auto list = RequiredTensors(spec);
  ASSERT_TRUE(list.ok()) << list.status().ToString();
  EXPECT_LE(static_cast<int64_t>(list.value().size()), weights::kMaxTensorRecords);
  proto::ModelFile file;
  file.set_format_version(2);
  *file.mutable_spec() = spec;
  for (const RequiredTensor& tensor : list.value()) {
    proto::TensorRecord* record = file.add_tensors();
    record->set_name(tensor.name);
    record->set_dtype(static_cast<int32_t>(tensor.dtype));
    for (const int64_t dim : tensor.shape) record->add_shape(1 << 20 | dim);
    record->set_layout(tensor.layout);
    record->set_offset(uint64_t{1} << 50);
    record->set_bytes(uint64_t{1} << 40);
    record->set_checksum(1);
  }
  const std::string graph = weights::EncodeGraph(file);
  EXPECT_LT(static_cast<int64_t>(graph.size()), weights::kMaxGraphBytes);
  proto::ModelFile parsed;
  EXPECT_TRUE(weights::DecodeGraph(graph, &parsed).ok());
}

}  // namespace
}  // namespace allspark::testing
