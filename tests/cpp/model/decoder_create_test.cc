// The specs and tables that Create refuses, and its error messages.
#include <functional>
#include <limits>
#include <map>

#include "cpp/model/decoder_harness.h"
#include "support/fault_allocator.h"

namespace allspark {
namespace {

using testing::OpenRandomModel;
using testing::TinyLlamaSpec;

constexpr DecoderOptions kOptions{128, 64, 8, 32};

// A reader whose spec and tensors a test can change.
class AlteredReader : public ModelReader {
 public:
  explicit AlteredReader(const ModelReader& inner) : inner_(inner), file_(inner.file()) {}

  const proto::ModelFile& file() const override { return file_; }
  const std::string& source() const override { return source_; }
  Result<WeightView> Find(std::string_view name) const override {
    Result<WeightView> view = inner_.Find(name);
    if (view.ok() && name == altered) alter(*view);
    return view;
  }
  proto::DecoderSpec& mutable_spec() { return *file_.mutable_spec(); }

  std::string altered;
  std::function<void(WeightView&)> alter;

 private:
  const ModelReader& inner_;
  proto::ModelFile file_;
  std::string source_ = "tiny.asgraph";
};

class DecoderCreateTest : public ::testing::Test {
 protected:
  Status Create(const ModelReader& reader, const DecoderOptions& options = kOptions) {
    return Decoder::Create(reader, options, device_).status();
  }
  void ExpectRefused(const Status& status, StatusCode code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_NE(status.message().find(part), std::string::npos) << status.ToString();
  }

  kernels::KernelTable table_ = *kernels::FindTable("reference");
  ThreadPool pool_{2, false};
  SystemAllocator allocator_{int64_t{1} << 28};
  CpuDevice device_{allocator_, pool_, table_};
  std::unique_ptr<ModelReader> reader_ = OpenRandomModel(TinyLlamaSpec(), 1);
};

TEST_F(DecoderCreateTest, Sizes) {
  auto decoder = Decoder::Create(*reader_, kOptions, device_);
  ASSERT_TRUE(decoder.ok()) << decoder.status().ToString();
  EXPECT_EQ((*decoder)->vocab_size(), 131);
  EXPECT_EQ(device_.KvBlockBytes((*decoder)->kv_shape()), 2 * 2 * 2 * 16 * 32 * 4);
  EXPECT_GT((*decoder)->arena_bytes(), 64 * (64 * 4 + 2 * 96 * 4));
}

TEST_F(DecoderCreateTest, OptionsOutOfRange) {
  const auto with = [](auto change) {
    DecoderOptions options = kOptions;
    change(options);
    return options;
  };
  const StatusCode bad = StatusCode::kInvalidArgument;
  ExpectRefused(Create(*reader_, with([](auto& o) { o.block_size = 24; })), bad,
                "block_size is 24; it must be 16, 32, 64 or 128");
  ExpectRefused(Create(*reader_, with([](auto& o) { o.block_size = 0; })), bad, "block_size is 0");
  ExpectRefused(Create(*reader_, with([](auto& o) { o.max_length = 0; })), bad, "max_length is 0");
  ExpectRefused(Create(*reader_, with([](auto& o) { o.max_length = (1 << 24) + 1; })), bad,
                "max_length is 16777217; it must be in [1, 16777216]");
  ExpectRefused(Create(*reader_, with([](auto& o) { o.max_tokens = -1; })), bad,
                "max_tokens is -1");
  ExpectRefused(Create(*reader_, with([](auto& o) { o.max_logits_rows = 0; })), bad,
                "max_logits_rows is 0");
  ExpectRefused(Create(*reader_, with([](auto& o) { o.rope_scaling_factor = 0.5; })), bad,
                "rope_scaling_factor is 0.500000; it must be 0 (off), or 1 or more");
}

TEST_F(DecoderCreateTest, ARopeThatCannotBeScaledStaysIfItMay) {
  AlteredReader reader(*reader_);
  const std::vector<float> scaled(8, 0.5f);
  reader.altered = "rope.inv_freq";
  reader.alter = [&](WeightView& view) { view.data = scaled.data(); };
  DecoderOptions options = kOptions;
  options.rope_scaling_factor = 2.0;
  ExpectRefused(Create(reader, options), StatusCode::kInvalidArgument,
                "rope_scaling_factor is 2.000000, but the model's rope frequencies are scaled");
  options.may_keep_rope = true;
  const Status status = Create(reader, options);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST_F(DecoderCreateTest, MissingKernelsNameOpAndDType) {
  const int f32 = static_cast<int>(DType::kFloat32);
  const std::map<std::string, std::function<void(kernels::KernelTable&)>> cases = {
      {"no gemm for float32", [=](auto& t) { t.gemm[f32][f32] = nullptr; }},
      {"no rms_norm for float32", [=](auto& t) { t.rms_norm[f32] = nullptr; }},
      {"no gated_act for float32", [=](auto& t) { t.gated_act[f32] = nullptr; }},
      {"no embedding for float32", [=](auto& t) { t.embedding[f32] = nullptr; }},
      {"no kv_write for float32", [=](auto& t) { t.kv_write[f32] = nullptr; }},
      {"no attention for float32", [=](auto& t) { t.attention[f32][f32] = nullptr; }},
      {"no rope for float32", [=](auto& t) { t.rope = nullptr; }},
  };
  for (const auto& [message, remove] : cases) {
    table_ = *kernels::FindTable("reference");
    remove(table_);
    ExpectRefused(Create(*reader_), StatusCode::kUnimplemented,
                  "kernel table 'reference' has " + message);
  }
  // The norm of heads writes float32 with every compute type.
  table_ = *kernels::FindTable("reference");
  table_.rms_norm[f32] = nullptr;
  const auto qwen3 = OpenRandomModel(testing::TinyQwen3Spec(proto::COMPUTE_BFLOAT16), 1);
  ExpectRefused(Create(*qwen3), StatusCode::kUnimplemented, "no rms_norm for float32");
  table_ = *kernels::FindTable("reference");
  table_.scale = nullptr;
  table_.convert[f32][static_cast<int>(DType::kBFloat16)] = nullptr;
  const auto gemma = OpenRandomModel(testing::TinyGemmaSpec(), 1);
  ExpectRefused(Create(*gemma), StatusCode::kUnimplemented, "no scale for float32");
  table_.scale = kernels::FindTable("reference")->scale;
  const auto olmo = OpenRandomModel(testing::TinyOlmoSpec(proto::COMPUTE_BFLOAT16), 1);
  ExpectRefused(Create(*olmo), StatusCode::kUnimplemented, "no convert for bfloat16");
  table_ = *kernels::FindTable("reference");
  table_.rms_norm[f32] = nullptr;
  const auto gpt2 = OpenRandomModel(testing::TinyGpt2Spec(), 1);
  EXPECT_TRUE(Create(*gpt2).ok());
  table_.layer_norm[f32] = nullptr;
  ExpectRefused(Create(*gpt2), StatusCode::kUnimplemented, "no layer_norm for float32");
  table_ = *kernels::FindTable("reference");
  table_.combine = nullptr;
  const auto mixtral = OpenRandomModel(testing::TinyMixtralSpec(), 1);
  ExpectRefused(Create(*mixtral), StatusCode::kUnimplemented, "no route or combine for float32");
  table_ = *kernels::FindTable("reference");
  table_.scale = nullptr;
  // Kernels that a spec does not use may be missing.
  table_.rope = nullptr;
  table_.rms_norm[f32] = kernels::FindTable("reference")->rms_norm[f32];
  proto::DecoderSpec spec = TinyLlamaSpec();
  spec.set_rotary_dim(0);
  const auto no_rope = OpenRandomModel(spec, 1);
  EXPECT_TRUE(Create(*no_rope).ok());
}

TEST_F(DecoderCreateTest, AnOrderOfColumnsMustBeOne) {
  const auto reader = OpenRandomModel(testing::TinyReorderedSpec(), 1);
  ASSERT_TRUE(Create(*reader).ok());
  const auto expect = [&](const std::string& tensor, int64_t at, int32_t value,
                          const std::string& part) {
    AlteredReader altered(*reader);
    altered.altered = tensor;
    std::vector<int32_t> order;
    altered.alter = [&](WeightView& view) {
      const auto* data = static_cast<const int32_t*>(view.data);
      order.assign(data, data + view.shape[0]);
      order[static_cast<size_t>(at)] = value;
      view.data = order.data();
    };
    ExpectRefused(Create(altered), StatusCode::kDataLoss, "tiny.asgraph: tensor '" + tensor + "'");
    ExpectRefused(Create(altered), StatusCode::kDataLoss, part);
  };
  expect("layers.0.qkv_order", 3, -1, "has -1 at 3; it must hold each of [0, 64) once");
  expect("layers.1.o_order", 0, 64, "has 64 at 0;");
  auto view = reader->Find("layers.0.down_order");
  ASSERT_TRUE(view.ok());
  expect("layers.0.down_order", 95, static_cast<const int32_t*>(view->data)[0], " at 95;");
}

TEST_F(DecoderCreateTest, InconsistentSpecs) {
  const StatusCode bad = StatusCode::kInvalidArgument;
  const auto with = [&](auto change) {
    AlteredReader reader(*reader_);
    change(reader.mutable_spec());
    return Create(reader);
  };
  ExpectRefused(with([](auto& s) { s.set_num_kv_heads(3); }), bad, "num_heads is 4");
  ExpectRefused(with([](auto& s) { s.set_num_layers(0); }), bad, "num_layers is 0");
  ExpectRefused(with([](auto& s) { s.set_hidden_size(int64_t{1} << 40); }), bad, "hidden_size");
  ExpectRefused(with([](auto& s) { s.set_head_dim(-16); }), bad, "head_dim is -16");
  ExpectRefused(with([](auto& s) { s.set_rotary_dim(18); }), bad, "rotary_dim is 18");
  ExpectRefused(with([](auto& s) { s.add_layer_window(4); }), bad, "layer_window has 1 values");
  ExpectRefused(with([](auto& s) { s.set_compute_type(proto::COMPUTE_UNSPECIFIED); }), bad,
                "compute_type");
}

TEST_F(DecoderCreateTest, PositionsBeyondTheTable) {
  const auto gpt2 = OpenRandomModel(testing::TinyGpt2Spec(), 1);
  DecoderOptions options = kOptions;
  options.max_length = 2049;
  const char* message = "max_length is 2049; the model has embeddings of 2048 positions";
  ExpectRefused(Create(*gpt2, options), StatusCode::kInvalidArgument, message);
  ExpectRefused(Decoder::Measure(*gpt2, options, device_).status(), StatusCode::kInvalidArgument,
                message);
  EXPECT_TRUE(Create(*reader_, options).ok());
}

TEST_F(DecoderCreateTest, SizesThatDoNotPack) {
  const auto with = [&](auto change) {
    AlteredReader reader(*reader_);
    reader.mutable_spec().set_compute_type(proto::COMPUTE_BFLOAT16);
    change(reader.mutable_spec());
    return Create(reader);
  };
  const auto odd_heads = [](auto& s) {
    s.set_head_dim(15);
    s.set_rotary_dim(14);
  };
  ExpectRefused(with(odd_heads), StatusCode::kUnimplemented,
                "head_dim is 15; elements lie in pairs, which need an even one");
  const StatusCode bad = StatusCode::kInvalidArgument;
  ExpectRefused(with([](auto& s) { s.set_hidden_size(63); }), bad,
                "hidden_size is 63; it must be a multiple of 2");
  ExpectRefused(with([](auto& s) { s.set_intermediate_size(97); }), bad, "intermediate_size is 97");
}

TEST_F(DecoderCreateTest, RopeFrequenciesMustBeFinite) {
  AlteredReader reader(*reader_);
  float frequencies[8] = {1, 1, 1, std::numeric_limits<float>::infinity(), 1, 1, 1, 1};
  reader.altered = "rope.inv_freq";
  reader.alter = [&](WeightView& v) { v.data = frequencies; };
  ExpectRefused(Create(reader), StatusCode::kDataLoss, "rope.inv_freq[3] is not finite");
}

TEST_F(DecoderCreateTest, NoMemoryIsAStatusAndLeaksNothing) {
  testing::FaultAllocator faults(&allocator_);
  CpuDevice device(faults, pool_, table_);
  int64_t n = 1;
  for (;; ++n) {
    faults.FailNth(n);
    auto decoder = Decoder::Create(*reader_, kOptions, device);
    if (faults.num_refused() == 0) {
      EXPECT_TRUE(decoder.ok()) << decoder.status().ToString();
      break;
    }
    EXPECT_EQ(decoder.status().code(), StatusCode::kResourceExhausted);
  }
  EXPECT_GT(n, 1);
  EXPECT_EQ(allocator_.Stats().num_live, 0);
}

}  // namespace
}  // namespace allspark
