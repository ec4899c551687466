#include "weights/model_writer.h"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <limits>
#include <random>

#include "cpp/weights/weights_test_util.h"
#include "support/sanitized.h"

namespace allspark::testing {
namespace {

std::unique_ptr<ModelWriter> ImageWriter(const proto::DecoderSpec& spec,
                                         ThreadPool* pool = nullptr) {
  return Must(ModelWriter::Create(spec, {}, "", "", pool));
}

void ExpectHoldsTheFormula(const ModelReader& reader) {
  for (const RequiredTensor& tensor : Required(reader.spec())) {
    const Result<WeightView> view = reader.Find(tensor.name);
    ASSERT_TRUE(view.ok()) << view.status().ToString();
    const auto expected = PlainStored(tensor, ValuesOf(tensor));
    ASSERT_EQ(view.value().bytes, static_cast<int64_t>(expected.size())) << tensor.name;
    EXPECT_EQ(view.value().dtype, tensor.dtype);
    EXPECT_EQ(view.value().layout, tensor.layout);
    EXPECT_EQ(view.value().rank, static_cast<int64_t>(tensor.shape.size()));
    EXPECT_EQ(view.value().shape[0], tensor.shape[0]);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.value().data) % 4096, 0u);
    EXPECT_EQ(std::memcmp(view.value().data, expected.data(), expected.size()), 0) << tensor.name;
  }
}

TEST(ModelWriter, RoundTripOfEveryLayoutAndDtype) {
  ThreadPool pool(2);
  for (const auto compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
    for (const DType source : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const proto::DecoderSpec& spec : {OddSpec(compute), SmallSpec(compute)}) {
        const TempDir dir;
        const auto image = BuildModel(spec, source, &pool);
        auto from_image = ModelReader::OpenImage(image, &pool);
        ASSERT_TRUE(from_image.ok()) << from_image.status().ToString();
        ExpectHoldsTheFormula(**from_image);
        EXPECT_EQ(BuildModel(spec, source, &pool, dir / "m"), nullptr);
        auto from_files = ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", &pool);
        ASSERT_TRUE(from_files.ok()) << from_files.status().ToString();
        ExpectHoldsTheFormula(**from_files);
        // Files and image are the same bytes, and nothing else is left behind.
        EXPECT_EQ(ReadFile(dir / "m.asgraph"), GraphOf(*image));
        EXPECT_EQ(ReadFile(dir / "m.asparam"), ParamOf(*image));
        EXPECT_EQ(dir.Files(), (std::vector<std::string>{"m.asgraph", "m.asparam"}));
      }
    }
  }
}

// Tensors of several checksum pieces, whose panels and rows straddle the pieces' ends.
proto::DecoderSpec ManyPiecesSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec = SmallSpec(compute);
  spec.set_tie_embeddings(false);
  spec.set_hidden_size(1100);
  spec.set_vocab_size(1301);
  spec.set_intermediate_size(702);
  spec.set_num_heads(5);
  spec.set_head_dim(62);
  return spec;
}

TEST(ModelWriter, BytesDoNotDependOnThreadsOrParts) {
  for (const auto compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
    const proto::DecoderSpec spec = ManyPiecesSpec(compute);
    const auto whole = BuildModel(spec, DType::kFloat16);
    auto opened = ModelReader::OpenImage(whole, nullptr);
    ASSERT_TRUE(opened.ok()) << opened.status().ToString();
    ExpectHoldsTheFormula(**opened);
    for (const bool to_files : {false, true}) {
      for (int threads = 1; threads <= 5; threads += 2) {
        ThreadPool pool(threads, false);
        std::mt19937 random(static_cast<unsigned>(threads));
        const TempDir dir;
        proto::BuildRecord build = (*opened)->file().build();
        auto writer = ModelWriter::Create(spec, build, to_files ? dir / "g" : "",
                                          to_files ? dir / "p" : "", &pool);
        ASSERT_TRUE(writer.ok());
        std::vector<std::tuple<RequiredTensor, int64_t, int64_t>> parts;
        for (const RequiredTensor& tensor : Required(spec)) {
          for (int64_t begin = 0; begin < Rows(tensor);) {
            const int64_t end =
                std::min(Rows(tensor), begin + 1 + static_cast<int64_t>(random() % 300));
            parts.emplace_back(tensor, begin, end);
            begin = end;
          }
        }
        std::shuffle(parts.begin(), parts.end(), random);
        for (const auto& [tensor, begin, end] : parts) {
          const Status added = AddRows(**writer, tensor, begin, end, DType::kFloat16);
          ASSERT_TRUE(added.ok()) << added.ToString();
        }
        auto image = (*writer)->Finish();
        ASSERT_TRUE(image.ok()) << image.status().ToString();
        EXPECT_EQ(to_files ? ReadFile(dir / "g") : GraphOf(*image.value()), GraphOf(*whole));
        EXPECT_TRUE((to_files ? ReadFile(dir / "p") : ParamOf(*image.value())) == ParamOf(*whole));
      }
    }
  }
}

TEST(ModelWriter, TakesStridedRowsAndIgnoresStridesOfSingleElements) {
  const proto::DecoderSpec spec = OddSpec(proto::COMPUTE_BFLOAT16);
  auto writer = ImageWriter(spec);
  for (const RequiredTensor& tensor : Required(spec)) {
    if (tensor.shape.size() == 1) {
      ASSERT_TRUE(AddRows(*writer, tensor, 0, Rows(tensor)).ok());
      continue;
    }
    const int64_t stride = Cols(tensor) + 5;
    std::vector<float> values(static_cast<size_t>(stride * Rows(tensor)),
                              std::numeric_limits<float>::quiet_NaN());  // Never to be read.
    for (int64_t r = 0; r < Rows(tensor); ++r) {
      for (int64_t c = 0; c < Cols(tensor); ++c) {
        values[static_cast<size_t>(r * stride + c)] = ValueAt(tensor.name, r, c);
      }
    }
    TensorView view = ViewRows(values.data(), DType::kFloat32, 2, Rows(tensor) - 1, Cols(tensor));
    view.strides[0] = stride;
    ASSERT_TRUE(writer->AddTensor(tensor.name, 0, view).ok());
    view.data = values.data() + (Rows(tensor) - 1) * stride;
    view.dims[0] = 1;
    view.strides[0] = -77;
    ASSERT_TRUE(writer->AddTensor(tensor.name, Rows(tensor) - 1, view).ok());
  }
  auto image = writer->Finish();
  ASSERT_TRUE(image.ok()) << image.status().ToString();
  auto reader = ModelReader::OpenImage(image.value(), nullptr);
  ASSERT_TRUE(reader.ok());
  ExpectHoldsTheFormula(**reader);
}

TEST(ModelWriter, RefusesBadValuesByTensorAndReason) {
  const proto::DecoderSpec spec = OddSpec(proto::COMPUTE_BFLOAT16);
  auto writer = ImageWriter(spec);
  std::vector<float> values(4000, 1.0f);
  const auto invalid = StatusCode::kInvalidArgument;
  auto add = [&](const char* name, int64_t row, const TensorView& view) {
    return writer->AddTensor(name, row, view);
  };
  const TensorView good = ViewRows(values.data(), DType::kFloat32, 2, 110, 18);
  ExpectError(add("mystery", 0, good), StatusCode::kNotFound, {"\"mystery\"", "OddForCausalLM"});
  TensorView view = good;
  view.dims[1] = 17;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"\"layers.0.qkv\"", "17 columns", "18"});
  ExpectError(add("layers.0.qkv", 1, good), invalid, {"110 rows from row 1", "[0, 110)"});
  ExpectError(add("layers.0.qkv", -1, good), invalid, {"from row -1"});
  ExpectError(add("layers.0.qkv", INT64_MAX, good), invalid, {"[0, 110)"});
  view = good;
  view.dims[0] = 0;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"0 rows"});
  view.dims[0] = INT64_MAX;
  ExpectError(add("layers.0.qkv", 5, view), invalid, {"[0, 110)"});
  view = good;
  view.rank = 1;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"rank 1", "[110, 18]"});
  ExpectError(add("final_norm", 0, good), invalid, {"\"final_norm\"", "rank 2"});
  view = good;
  view.dtype = DType::kInt8;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"float32, float16 or bfloat16"});
  view = good;
  view.data = nullptr;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"no data"});
  view = good;
  view.strides[0] = 17;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"not row-major", "17, 1"});
  view = good;
  view.strides[1] = 110;
  ExpectError(add("layers.0.qkv", 0, view), invalid, {"not row-major"});
  view = ViewRows(values.data(), DType::kFloat32, 1, 18, 1);
  view.strides[0] = 2;
  ExpectError(add("final_norm", 0, view), invalid, {"not row-major"});
}

TEST(ModelWriter, RefusesWhatIsNotFiniteAndTakesItRepaired) {
  for (const bool to_files : {false, true}) {
    const TempDir dir;
    const proto::DecoderSpec spec = ManyPiecesSpec(proto::COMPUTE_BFLOAT16);
    auto writer = ModelWriter::Create(spec, {}, to_files ? dir / "g" : "",
                                      to_files ? dir / "p" : "", nullptr);
    ASSERT_TRUE(writer.ok());
    for (const RequiredTensor& tensor : Required(spec)) {
      std::vector<float> values = ValuesOf(tensor);
      const auto rank = static_cast<int32_t>(tensor.shape.size());
      const size_t at = values.size() - 2;
      const auto row = std::to_string(static_cast<int64_t>(at) / Cols(tensor));
      const auto col = std::to_string(static_cast<int64_t>(at) % Cols(tensor));
      const TensorView view =
          ViewRows(values.data(), DType::kFloat32, rank, Rows(tensor), Cols(tensor));
      const float right = values[at];
      values[at] = std::numeric_limits<float>::quiet_NaN();
      ExpectError((*writer)->AddTensor(tensor.name, 0, view), StatusCode::kInvalidArgument,
                  {tensor.name, "row " + row + ", column " + col + " is nan", "finite"});
      values[at] = -std::numeric_limits<float>::infinity();
      ExpectError((*writer)->AddTensor(tensor.name, 0, view), StatusCode::kInvalidArgument,
                  {"is -inf"});
      if (tensor.dtype == DType::kBFloat16) {
        values[at] = std::numeric_limits<float>::max();
        ExpectError((*writer)->AddTensor(tensor.name, 0, view), StatusCode::kInvalidArgument,
                    {"does not fit bfloat16"});
      }
      values[at] = right;
      // In different parts from the first time.
      ASSERT_TRUE(AddRows(**writer, tensor, 0, 2).ok());
      ASSERT_TRUE(AddRows(**writer, tensor, 2, Rows(tensor)).ok());
    }
    auto image = (*writer)->Finish();
    ASSERT_TRUE(image.ok()) << image.status().ToString();
    auto reader = to_files ? ModelReader::OpenFiles(dir / "g", dir / "p", nullptr)
                           : ModelReader::OpenImage(image.value(), nullptr);
    ASSERT_TRUE(reader.ok()) << reader.status().ToString();
    ExpectHoldsTheFormula(**reader);
  }
}

TEST(ModelWriter, TracksRows) {
  const proto::DecoderSpec spec = SmallSpec();
  auto writer = ImageWriter(spec);
  const RequiredTensor qkv = TensorNamed(spec, "layers.0.qkv");
  ASSERT_TRUE(AddRows(*writer, qkv, 2, 4).ok());
  ExpectError(AddRows(*writer, qkv, 3, 5), StatusCode::kInvalidArgument,
              {"\"layers.0.qkv\"", "rows [3, 5) were added before", "[2, 4)"});
  ExpectError(AddRows(*writer, qkv, 0, 8), StatusCode::kInvalidArgument, {"added before"});
  ExpectError(writer->Finish().status(), StatusCode::kFailedPrecondition,
              {"\"layers.0.qkv\" rows [0, 2) [4, 8)", "\"embedding\" rows [0, 5)",
               "\"final_norm\" rows [0, 4)"});
  // Finish has changed nothing.
  ASSERT_TRUE(AddRows(*writer, qkv, 0, 2).ok());
  ASSERT_TRUE(AddRows(*writer, qkv, 4, 8).ok());
  for (const RequiredTensor& tensor : Required(spec)) {
    if (tensor.name != qkv.name) {
      ASSERT_TRUE(AddRows(*writer, tensor, 0, Rows(tensor)).ok());
    }
  }
  auto image = writer->Finish();
  ASSERT_TRUE(image.ok()) << image.status().ToString();
  ExpectError(writer->Finish().status(), StatusCode::kFailedPrecondition, {"finished"});
  ExpectError(AddRows(*writer, qkv, 0, 1), StatusCode::kFailedPrecondition, {"finished"});
  writer.reset();  // The image does not need its writer.
  auto reader = ModelReader::OpenImage(image.value(), nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  ExpectHoldsTheFormula(**reader);
}

TEST(ModelWriter, ListsABoundedNumberOfMissingRanges) {
  proto::DecoderSpec spec = SmallSpec();
  spec.set_num_layers(4096);
  auto writer = ImageWriter(spec);
  const Status status = writer->Finish().status();
  ExpectError(status, StatusCode::kFailedPrecondition, {"ranges in all"});
  EXPECT_LT(status.message().size(), 20000u);
}

TEST(ModelWriter, RefusesBadTargets) {
  const TempDir dir;
  const proto::DecoderSpec spec = SmallSpec();
  auto create = [&](const std::string& graph, const std::string& param) {
    return ModelWriter::Create(spec, {}, graph, param, nullptr).status();
  };
  ExpectError(create(dir / "a", ""), StatusCode::kInvalidArgument, {"graph_path", "param_path"});
  ExpectError(create("", dir / "a"), StatusCode::kInvalidArgument, {"graph_path"});
  ExpectError(create(dir / "a", dir / "a"), StatusCode::kInvalidArgument, {"differ"});
  ExpectError(create(dir / "none/a", dir / "b"), StatusCode::kNotFound, {"none/a"});
  ExpectError(create(dir / "a", dir / "none/b"), StatusCode::kNotFound, {"none/b"});
  ASSERT_EQ(mkdir((dir / "d").c_str(), 0777), 0);
  ExpectError(create(dir / "a", dir / "d"), StatusCode::kInvalidArgument, {"/d is a directory"});
  ExpectError(create(dir / std::string(300, 'x'), dir / "b"), StatusCode::kInvalidArgument,
              {"xxx"});
  EXPECT_EQ(dir.Files(), std::vector<std::string>{"d"});  // Nothing is left behind.
  proto::DecoderSpec bad = spec;
  bad.set_hidden_size(0);
  ExpectError(ModelWriter::Create(bad, {}, "", "", nullptr).status(), StatusCode::kInvalidArgument,
              {"hidden_size is 0"});
  bad = spec;
  bad.set_architecture("\xff");
  ExpectError(ModelWriter::Create(bad, {}, "", "", nullptr).status(), StatusCode::kInvalidArgument,
              {"architecture", "UTF-8"});
  proto::BuildRecord build;
  (*build.mutable_options())["k"] = "\xc0";
  ExpectError(ModelWriter::Create(spec, build, "", "", nullptr).status(),
              StatusCode::kInvalidArgument, {"build.options[k]", "UTF-8"});
}

TEST(ModelWriter, AnUnfinishedWriterRemovesItsFilesAndKeepsOldOnes) {
  const TempDir dir;
  WriteFile(dir / "m.asgraph", "old graph");
  WriteFile(dir / "m.asparam", "old param");
  {
    auto writer =
        ModelWriter::Create(SmallSpec(), {}, dir / "m.asgraph", dir / "m.asparam", nullptr);
    ASSERT_TRUE(writer.ok());
    EXPECT_EQ(dir.Files().size(), 4u);
    ASSERT_TRUE(AddRows(**writer, Required(SmallSpec())[0], 0, 5).ok());
  }
  EXPECT_EQ(dir.Files().size(), 2u);
  EXPECT_EQ(ReadFile(dir / "m.asgraph"), "old graph");
  EXPECT_EQ(ReadFile(dir / "m.asparam"), "old param");
  BuildModel(SmallSpec(), DType::kFloat32, nullptr,
             dir / "m");  // And a finished one replaces them.
  EXPECT_TRUE(ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", nullptr).ok());
}

TEST(ModelWriter, RemovesWhatAKilledProcessLeft) {
  const TempDir dir;
  const std::vector<std::string> others = {"m.asparam.tmp-1-0.bak", "n.asparam.tmp-1-0"};
  for (const std::string& name : others) WriteFile(dir / name, "somebody else's");
  WriteFile(dir / "m.asparam.tmp-1-0", "a large file");
  WriteFile(dir / "m.asgraph.tmp-2-7", "a small one");
  // The files of a running writer are locked.
  auto working =
      ModelWriter::Create(SmallSpec(), {}, dir / "m.asgraph", dir / "m.asparam", nullptr);
  ASSERT_TRUE(working.ok());
  BuildModel(SmallSpec(), DType::kFloat32, nullptr, dir / "m");
  std::vector<std::string> left = dir.Files();
  const auto is_temporary = [](const std::string& name) {
    return name.find(".tmp-" + std::to_string(getpid())) != std::string::npos;
  };
  EXPECT_EQ(std::erase_if(left, is_temporary), 2u);
  EXPECT_EQ(left, (std::vector<std::string>{"m.asgraph", "m.asparam", others[0], others[1]}));
  for (const RequiredTensor& tensor : Required(SmallSpec())) {
    ASSERT_TRUE(AddRows(**working, tensor, 0, Rows(tensor)).ok());
  }
  EXPECT_TRUE((*working)->Finish().ok());
  EXPECT_EQ(dir.Files().size(), 4u);
}

TEST(ModelWriter, APathIsNotCutAtANul) {
  const TempDir dir;
  const std::string graph = dir / std::string("m\0.asgraph", 10);
  ExpectError(ModelWriter::Create(SmallSpec(), {}, graph, dir / "m.asparam", nullptr).status(),
              StatusCode::kInvalidArgument, {"/m...", "NUL character"});
  ExpectError(ModelReader::OpenFiles(graph, dir / "m.asparam", nullptr).status(),
              StatusCode::kInvalidArgument, {"/m...", "NUL character"});
  EXPECT_TRUE(dir.Files().empty());
}

TEST(ModelWriter, AFailedSecondRenameLeavesNothing) {
  const TempDir dir;
  const proto::DecoderSpec spec = SmallSpec();
  auto writer = ModelWriter::Create(spec, {}, dir / "g", dir / "p", nullptr);
  ASSERT_TRUE(writer.ok());
  for (const RequiredTensor& tensor : Required(spec)) {
    ASSERT_TRUE(AddRows(**writer, tensor, 0, Rows(tensor)).ok());
  }
  ASSERT_EQ(mkdir((dir / "g").c_str(), 0777), 0);  // Appears in the meantime.
  ExpectError((*writer)->Finish().status(), StatusCode::kInvalidArgument, {"rename", "/g"});
  EXPECT_FALSE((*writer)->Finish().ok());
  EXPECT_EQ(dir.Files(), std::vector<std::string>{"g"});
}

TEST(ModelWriter, AnImageLargerThanMemoryIsRefused) {
  proto::DecoderSpec spec = SmallSpec();
  spec.set_vocab_size(1 << 24);
  spec.set_hidden_size(1 << 20);
  ExpectError(ModelWriter::Create(spec, {}, "", "", nullptr).status(),
              StatusCode::kResourceExhausted, {"memory image of 70", "available"});
}

TEST(ModelWriter, FilesLargerThanTheFileSystemAreRefusedAtOnce) {
  const TempDir dir;
  proto::DecoderSpec spec = SmallSpec();
  spec.set_vocab_size(1 << 24);
  spec.set_hidden_size(1 << 20);
  spec.set_num_layers(1000);
  ExpectError(ModelWriter::Create(spec, {}, dir / "g", dir / "p", nullptr).status(),
              StatusCode::kResourceExhausted, {"/p needs", "free"});
  EXPECT_TRUE(dir.Files().empty());
}

// Lowers the file size limit for one scope.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old_);
    struct rlimit limit = old_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  struct rlimit old_;
  void (*old_handler_)(int);
};

TEST(ModelWriter, AFileSizeLimitIsRefusedAtOnce) {
  const TempDir dir;
  const FileSizeLimit limit(20000);
  ExpectError(ModelWriter::Create(SmallSpec(), {}, dir / "g", dir / "p", nullptr).status(),
              StatusCode::kResourceExhausted, {"/p needs 36864 bytes", "RLIMIT_FSIZE"});
  EXPECT_TRUE(dir.Files().empty());
}

// Fails the n-th write, for every n.
TEST(ModelWriter, AnyFailingWriteIsAStatusAndLeavesNothing) {
  const proto::DecoderSpec spec = SmallSpec();
  for (rlim_t room = 0; room < 36864; room += 4096) {
    const TempDir dir;
    auto writer = ModelWriter::Create(spec, {}, dir / "g", dir / "p", nullptr);
    ASSERT_TRUE(writer.ok());
    Status status;
    {
      const FileSizeLimit limit(room);
      for (const RequiredTensor& tensor : Required(spec)) {
        if (status.ok()) status = AddRows(**writer, tensor, 0, Rows(tensor));
      }
      if (status.ok()) status = (*writer)->Finish().status();
    }
    ExpectError(status, StatusCode::kResourceExhausted, {"write at offset", "/p"});
    EXPECT_EQ(status.as_status(), AsStatus::kIoError);
    EXPECT_TRUE(dir.Files().empty());
    // The writer stays failed, and says why.
    EXPECT_EQ(AddRows(**writer, Required(spec)[0], 0, 5).message(), status.message());
    EXPECT_EQ((*writer)->Finish().status().message(), status.message());
  }
}

TEST(ModelWriter, AFullFileSystemIsAStatus) {
  const TempDir dir;
  if (mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "mounting a small tmpfs needs privileges";
  }
  proto::DecoderSpec spec = SmallSpec();
  spec.set_vocab_size(40000);  // 640 KB
  Status status;
  {
    auto writer = ModelWriter::Create(spec, {}, dir / "g", dir / "p", nullptr);
    EXPECT_TRUE(writer.ok()) << writer.status().ToString();
    WriteFile(dir / "other", std::string(700 << 10, 'x'));  // Takes the room in the meantime.
    ExpectError(ModelWriter::Create(spec, {}, dir / "g2", dir / "p2", nullptr).status(),
                StatusCode::kResourceExhausted, {"/p2 needs", "free"});
    for (const RequiredTensor& tensor : Required(spec)) {
      if (status.ok()) status = AddRows(**writer, tensor, 0, Rows(tensor));
    }
  }
  EXPECT_EQ(dir.Files(), std::vector<std::string>{"other"});
  umount(dir.path().c_str());
  ExpectError(status, StatusCode::kResourceExhausted,
              {"\"embedding\"", "write at offset", "space"});
}

int64_t PeakResidentBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int64_t kib = 0;
  while (status >> word) {
    if (word == "VmHWM:") status >> kib;
  }
  return kib * 1024;
}

// Converts a model of 260 MB (36 MB quantised) from one small buffer; returns the peak growth of
// the process's memory.
int64_t PeakGrowth(const std::string& stem, std::shared_ptr<const ModelImage>* image,
                   bool quantise = false) {
  proto::DecoderSpec spec = SmallSpec();
  spec.set_tie_embeddings(false);
  spec.set_vocab_size(32000);
  spec.set_hidden_size(1024);
  for (const char* tensor : {"embedding", "lm_head"}) {
    if (!quantise) break;
    proto::WeightQuant* quant = spec.add_weight_quant();
    quant->set_tensor(tensor);
    quant->set_bits(4);
    quant->set_group_size(32);
  }
  ThreadPool pool(2);
  std::vector<float> values(1000 * 1024, 0.5f);
  WriteFile("/proc/self/clear_refs", "5");  // Resets the peak.
  const int64_t before = PeakResidentBytes();
  auto writer = ModelWriter::Create(spec, {}, stem.empty() ? "" : stem + ".asgraph",
                                    stem.empty() ? "" : stem + ".asparam", &pool);
  EXPECT_TRUE(writer.ok());
  for (const RequiredTensor& tensor : Required(spec)) {
    if (tensor.layout == proto::PANEL64_SCALE) continue;
    for (int64_t begin = 0; begin < Rows(tensor); begin += 1000) {
      const TensorView view =
          ViewRows(values.data(), DType::kFloat32, static_cast<int32_t>(tensor.shape.size()),
                   std::min<int64_t>(1000, Rows(tensor) - begin), Cols(tensor));
      const Status added = (*writer)->AddTensor(tensor.name, begin, view);
      EXPECT_TRUE(added.ok()) << added.ToString();
    }
  }
  auto finished = (*writer)->Finish();
  EXPECT_TRUE(finished.ok());
  *image = finished.value();
  return PeakResidentBytes() - before;
}

TEST(ModelWriter, PeakMemoryIsTheModelOnceForAnImageAndBuffersForFiles) {
  if (AS_SANITIZED) GTEST_SKIP() << "the sanitizer's own memory counts, too";
  const TempDir dir;
  std::shared_ptr<const ModelImage> image;
  EXPECT_LT(PeakGrowth(dir / "m", &image), 8 << 20);
  EXPECT_EQ(image, nullptr);
  const int64_t growth = PeakGrowth("", &image);
  ASSERT_NE(image, nullptr);
  EXPECT_GT(image->param_bytes(), 250 << 20);
  EXPECT_LT(growth, image->param_bytes() + (8 << 20));
  image.reset();
  EXPECT_LT(PeakGrowth(dir / "q", &image, true), 8 << 20);
  const int64_t quantised = PeakGrowth("", &image, true);
  EXPECT_LT(image->param_bytes(), 40 << 20);
  EXPECT_LT(quantised, image->param_bytes() + (8 << 20));
}

}  // namespace
}  // namespace allspark::testing
