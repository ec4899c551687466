// Files of every format version stay readable: tests/golden holds one pair per version of the
// model, and one file per version of the adapter, written once and never again.
// ALLSPARK_WRITE_GOLDEN=<folder> writes the newest versions' files, for use when a version is
// added.
#include <cstdlib>

#include "allspark/model_serializer.h"
#include "cpp/weights/weights_test_util.h"
#include "weights/lora_file.h"
#include "weights/lora_format.h"

namespace allspark::testing {
namespace {

std::string GoldenPath(const std::string& name) {
  const std::string relative = "tests/golden/" + name;
  if (std::filesystem::exists(relative)) return relative;
  return (std::filesystem::path(__FILE__).parent_path() / "../../golden" / name).string();
}

// The spec of a version's golden files.
proto::DecoderSpec GoldenSpec(int version) {
  proto::DecoderSpec spec = SmallSpec(proto::COMPUTE_BFLOAT16);
  spec.set_architecture("GoldenForCausalLM");
  spec.set_activation(proto::GELU_TANH);
  spec.set_attention_soft_cap(30.0f);
  spec.add_layer_window(8);
  if (version == 1) return spec;
  spec.set_tie_embeddings(false);
  spec.set_hidden_size(32);
  spec.set_head_dim(16);
  spec.set_intermediate_size(32);
  auto quantise = [&](const char* tensor, int bits, int64_t group, bool asymmetric) {
    proto::WeightQuant* quant = spec.add_weight_quant();
    quant->set_tensor(tensor);
    quant->set_bits(bits);
    quant->set_group_size(group);
    quant->set_asymmetric(asymmetric);
  };
  quantise("embedding", 4, 32, true);
  quantise("layers.0.qkv", 8, 0, false);
  quantise("layers.0.o", 8, 32, true);
  quantise("layers.0.gate_up", 4, 0, false);
  quantise("layers.0.down", 4, 32, true);
  spec.mutable_weight_quant(1)->set_quantize_activations(true);
  if (version == 2) return spec;
  spec.set_embedding_scale(4.0f);
  spec.set_residual_scale(0.5f);
  spec.set_logits_scale(0.25f);
  spec.set_logits_soft_cap(30.0f);
  spec.set_norm_placement(proto::NORM_AROUND);
  spec.set_qk_norm(true);
  spec.set_qk_norm_whole(true);
  spec.set_rotary_dim(8);
  spec.set_window_rope(true);
  if (version == 3) return spec;
  for (const int i : {2, 4}) spec.mutable_weight_quant(i)->set_reordered(true);
  if (version == 4) return spec;
  spec.mutable_weight_quant(1)->set_activation_group_size(32);
  if (version == 5) return spec;
  proto::WeightQuant* quant = spec.mutable_weight_quant(0);
  quant->set_asymmetric(false);
  quant->set_table(
      std::string("\x80\x01\x02\x03\x04\x05\x06\x07\x10\x11\x12\x13\x14\x15\x16\x7f", 16));
  quant = spec.mutable_weight_quant(2);
  quant->set_asymmetric(false);
  quant->set_bits(6);
  quant->set_group_size(16);
  spec.mutable_weight_quant(3)->set_bits(8);
  spec.mutable_weight_quant(3)->set_float8(true);
  quant = spec.mutable_weight_quant(4);
  quant->set_asymmetric(false);
  quant->set_offset(true);
  quant->set_half_scales(true);
  if (version == 6) return spec;
  quant->set_half_scales(false);
  quant->set_scale_codes(true);
  spec.set_intermediate_size(256);
  spec.mutable_weight_quant(0)->set_power_scales(true);
  if (version == 7) return spec;
  spec.set_compute_type(proto::COMPUTE_FLOAT16);
  return spec;
}

// No std::hash here: the values must always be the same, with every library. Quantised weights are
// added in stored form: a quantiser's choices are not part of the format.
float GoldenValue(int64_t tensor_idx, const RequiredTensor& tensor, int64_t row, int64_t col) {
  const int64_t at = tensor_idx * 5 + row * 7 + col * 3;
  if (tensor.dtype == DType::kUInt8 && tensor.name == "embedding_scale") {
    return static_cast<float>(at % 255);  // 255 would be infinite.
  }
  if (tensor.dtype == DType::kUInt8) return static_cast<float>(at % 256);
  if (tensor.dtype == DType::kUInt4) return static_cast<float>(at % 16);
  if (tensor.dtype == DType::kUInt2) return static_cast<float>(at % 4);
  if (tensor.dtype == DType::kFloat8E4M3) return static_cast<float>(at % 127);
  if (tensor.dtype == DType::kInt32) return static_cast<float>((row * 7 + 3) % tensor.shape[0]);
  return static_cast<float>(1 + tensor_idx) + static_cast<float>(row * 8 + col) * 0.015625f;
}

std::vector<float> GoldenValues(int64_t tensor_idx, const RequiredTensor& tensor) {
  std::vector<float> values;
  for (int64_t r = 0; r < Rows(tensor); ++r) {
    for (int64_t c = 0; c < Cols(tensor); ++c) {
      values.push_back(GoldenValue(tensor_idx, tensor, r, c));
    }
  }
  return values;
}

void WriteGolden(int version, const std::string& stem) {
  proto::BuildRecord build;
  build.set_version("golden");
  build.set_source("tests/cpp/weights/golden_test.cc");
  (*build.mutable_options())["purpose"] = "stays readable";
  auto writer = ModelWriter::Create(GoldenSpec(version), build, stem + ".asgraph",
                                    stem + ".asparam", nullptr);
  ASSERT_TRUE(writer.ok()) << writer.status().ToString();
  int64_t tensor_idx = 0;
  for (const RequiredTensor& tensor : Required(GoldenSpec(version))) {
    const bool integers = tensor.dtype == DType::kUInt8 || tensor.dtype == DType::kUInt4 ||
                          tensor.dtype == DType::kUInt2 || tensor.dtype == DType::kFloat8E4M3;
    const bool is_order = tensor.dtype == DType::kInt32;
    const DType dtype = integers ? DType::kUInt8 : is_order ? tensor.dtype : DType::kFloat32;
    const auto values = Encode(GoldenValues(tensor_idx++, tensor), dtype);
    const auto rank = static_cast<int32_t>(tensor.shape.size());
    const Status added = (*writer)->AddTensor(
        tensor.name, 0, ViewRows(values.data(), dtype, rank, Rows(tensor), Cols(tensor)));
    ASSERT_TRUE(added.ok()) << added.ToString();
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

std::string Name(int version) { return "v" + std::to_string(version); }

// The adapter of every version: two modules of one fused tensor, and the embedding.
const std::vector<LoraPair>& GoldenPairs() {
  static const std::vector<LoraPair> pairs = {
      {"layers.0.qkv", 0, 4, 4, 3}, {"layers.0.qkv", 6, 2, 4, 1}, {"embedding", 0, 4, 5, 2}};
  return pairs;
}

std::vector<float> GoldenMatrix(int64_t pair_idx, char matrix, int64_t size) {
  std::vector<float> values;
  for (int64_t i = 0; i < size; ++i) {
    values.push_back(static_cast<float>(matrix == 'a' ? 1 + pair_idx : -1 - pair_idx) +
                     static_cast<float>(i) * 0.015625f);
  }
  return values;
}

void WriteGoldenLora(const std::string& path) {
  proto::BuildRecord build;
  build.set_version("golden");
  auto serializer = LoraSerializer::Create(build.SerializeAsString(), path);
  ASSERT_TRUE(serializer.ok()) << serializer.status().ToString();
  int64_t idx = 0;
  for (const LoraPair& pair : GoldenPairs()) {
    const Status added = (*serializer)
                             ->AddPair(pair.tensor, pair.row_begin, pair.rows, pair.cols, pair.rank,
                                       GoldenMatrix(idx, 'a', pair.rank * pair.cols),
                                       GoldenMatrix(idx, 'b', pair.rank * pair.rows));
    ASSERT_TRUE(added.ok()) << added.ToString();
    ++idx;
  }
  ASSERT_TRUE((*serializer)->Finish().ok());
}

std::string LoraName(uint32_t version) { return "v" + std::to_string(version) + ".aslora"; }

TEST(Golden, WriteWhenAsked) {
  const char* folder = std::getenv("ALLSPARK_WRITE_GOLDEN");
  if (folder == nullptr) GTEST_SKIP() << "set ALLSPARK_WRITE_GOLDEN to write the golden files";
  WriteGolden(weights::kFormatVersion, std::string(folder) + "/" + Name(weights::kFormatVersion));
  WriteGoldenLora(std::string(folder) + "/" + LoraName(weights::kLoraVersion));
}

class GoldenVersion : public ::testing::TestWithParam<int> {};

TEST_P(GoldenVersion, IsReadable) {
  const int version = GetParam();
  auto reader = ModelReader::OpenFiles(GoldenPath(Name(version) + ".asgraph"),
                                       GoldenPath(Name(version) + ".asparam"), nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  const proto::ModelFile& file = (*reader)->file();
  EXPECT_EQ(file.format_version(), static_cast<uint32_t>(version));
  EXPECT_EQ(file.spec().SerializeAsString(), GoldenSpec(version).SerializeAsString());
  EXPECT_EQ(file.build().version(), "golden");
  EXPECT_EQ(file.build().options().at("purpose"), "stays readable");
  int64_t tensor_idx = 0;
  for (const RequiredTensor& tensor : Required(GoldenSpec(version))) {
    const Result<WeightView> view = (*reader)->Find(tensor.name);
    ASSERT_TRUE(view.ok()) << view.status().ToString();
    const auto expected = PlainStored(tensor, GoldenValues(tensor_idx++, tensor));
    ASSERT_EQ(view.value().bytes, static_cast<int64_t>(expected.size()));
    EXPECT_EQ(std::memcmp(view.value().data, expected.data(), expected.size()), 0) << tensor.name;
  }
}

// A model is written in the oldest version that can hold it, and always with the same bytes. This
// test detects a change of the format, which needs a new version.
TEST_P(GoldenVersion, IsWhatTheWriterWrites) {
  const int version = GetParam();
  const TempDir dir;
  WriteGolden(version, dir / "now");
  for (const char* ending : {".asgraph", ".asparam"}) {
    EXPECT_TRUE(ReadFile(dir / "now" + ending) == ReadFile(GoldenPath(Name(version) + ending)));
  }
}

INSTANTIATE_TEST_SUITE_P(Every, GoldenVersion, ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

TEST(GoldenLora, IsReadable) {
  auto file = LoraFile::Open(GoldenPath(LoraName(1)));
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  ASSERT_EQ((*file)->pairs().size(), GoldenPairs().size());
  int64_t idx = 0;
  for (const LoraPair& expected : GoldenPairs()) {
    const LoraPair& pair = (*file)->pairs()[static_cast<size_t>(idx)];
    EXPECT_EQ(pair.tensor, expected.tensor);
    EXPECT_EQ(pair.row_begin, expected.row_begin);
    EXPECT_EQ(pair.rows, expected.rows);
    EXPECT_EQ(pair.cols, expected.cols);
    ASSERT_EQ(pair.rank, expected.rank);
    const std::vector<float> a = GoldenMatrix(idx, 'a', pair.rank * pair.cols);
    const std::vector<float> b = GoldenMatrix(idx, 'b', pair.rank * pair.rows);
    EXPECT_EQ(std::vector<float>(pair.a, pair.a + a.size()), a);
    EXPECT_EQ(std::vector<float>(pair.b, pair.b + b.size()), b);
    ++idx;
  }
}

TEST(GoldenLora, IsWhatTheSerializerWrites) {
  const TempDir dir;
  WriteGoldenLora(dir / "now.aslora");
  EXPECT_TRUE(ReadFile(dir / "now.aslora") == ReadFile(GoldenPath(LoraName(1))));
}

}  // namespace
}  // namespace allspark::testing
