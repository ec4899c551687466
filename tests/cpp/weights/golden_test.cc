// Files of every format version stay readable: tests/golden holds one pair per version, written
// once and never again. ALLSPARK_WRITE_GOLDEN=<folder> writes the newest version's pair, for the
// day a version is added.
#include <cstdlib>

#include "cpp/weights/weights_test_util.h"

namespace allspark::testing {
namespace {

std::string GoldenPath(const std::string& name) {
  const std::string relative = "tests/golden/" + name;
  if (std::filesystem::exists(relative)) return relative;
  return (std::filesystem::path(__FILE__).parent_path() / "../../golden" / name).string();
}

proto::DecoderSpec GoldenSpec() {
  proto::DecoderSpec spec = SmallSpec(proto::COMPUTE_BFLOAT16);
  spec.set_architecture("GoldenForCausalLM");
  spec.set_activation(proto::GELU_TANH);
  spec.set_attention_soft_cap(30.0f);
  spec.add_layer_window(8);
  return spec;
}

// No std::hash here: the values must be the same with every library, for ever.
float GoldenValue(int64_t tensor_idx, int64_t row, int64_t col) {
  return static_cast<float>(1 + tensor_idx) + static_cast<float>(row * 8 + col) * 0.015625f;
}

std::vector<float> GoldenValues(int64_t tensor_idx, const RequiredTensor& tensor) {
  std::vector<float> values;
  for (int64_t r = 0; r < Rows(tensor); ++r) {
    for (int64_t c = 0; c < Cols(tensor); ++c) values.push_back(GoldenValue(tensor_idx, r, c));
  }
  return values;
}

void WriteGolden(const std::string& stem) {
  proto::BuildRecord build;
  build.set_version("golden");
  build.set_source("tests/cpp/weights/golden_test.cc");
  (*build.mutable_options())["purpose"] = "stays readable";
  auto writer =
      ModelWriter::Create(GoldenSpec(), build, stem + ".asgraph", stem + ".asparam", nullptr);
  ASSERT_TRUE(writer.ok()) << writer.status().ToString();
  int64_t tensor_idx = 0;
  for (const RequiredTensor& tensor : Required(GoldenSpec())) {
    const auto values = GoldenValues(tensor_idx++, tensor);
    ASSERT_TRUE((*writer)
                    ->AddTensor(tensor.name, 0,
                                ViewRows(values.data(), DType::kFloat32,
                                         static_cast<int32_t>(tensor.shape.size()), Rows(tensor),
                                         Cols(tensor)))
                    .ok());
  }
  ASSERT_TRUE((*writer)->Finish().ok());
}

TEST(Golden, WriteWhenAsked) {
  const char* folder = std::getenv("ALLSPARK_WRITE_GOLDEN");
  if (folder == nullptr) GTEST_SKIP() << "set ALLSPARK_WRITE_GOLDEN to write the golden files";
  WriteGolden(std::string(folder) + "/v" + std::to_string(weights::kFormatVersion));
}

TEST(Golden, Version1IsReadable) {
  auto reader = ModelReader::OpenFiles(GoldenPath("v1.asgraph"), GoldenPath("v1.asparam"), nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  const proto::ModelFile& file = (*reader)->file();
  EXPECT_EQ(file.format_version(), 1u);
  EXPECT_EQ(file.spec().SerializeAsString(), GoldenSpec().SerializeAsString());
  EXPECT_EQ(file.build().version(), "golden");
  EXPECT_EQ(file.build().options().at("purpose"), "stays readable");
  int64_t tensor_idx = 0;
  for (const RequiredTensor& tensor : Required(GoldenSpec())) {
    const Result<WeightView> view = (*reader)->Find(tensor.name);
    ASSERT_TRUE(view.ok()) << view.status().ToString();
    const auto expected = PlainStored(tensor, GoldenValues(tensor_idx++, tensor));
    ASSERT_EQ(view.value().bytes, static_cast<int64_t>(expected.size()));
    EXPECT_EQ(std::memcmp(view.value().data, expected.data(), expected.size()), 0) << tensor.name;
  }
}

// The writer of the same version gives the same bytes: a change of the format shows here, and then
// needs a new version.
TEST(Golden, TheWriterStillWritesTheseBytes) {
  const TempDir dir;
  WriteGolden(dir / "now");
  EXPECT_TRUE(ReadFile(dir / "now.asgraph") == ReadFile(GoldenPath("v1.asgraph")));
  EXPECT_TRUE(ReadFile(dir / "now.asparam") == ReadFile(GoldenPath("v1.asparam")));
}

}  // namespace
}  // namespace allspark::testing
