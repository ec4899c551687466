#include "weights/model_reader.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <functional>

#include "cpp/weights/weights_test_util.h"
#include "support/process_usage.h"
#include "support/random_model.h"
#include "weights/checksum.h"
#include "weights/describe.h"

namespace allspark::testing {
namespace {

// The bytes of one valid model, for tests to damage.
struct Bytes {
  std::string graph;
  std::string param;
  proto::ModelFile file;
};

Bytes GoodBytes(const proto::DecoderSpec& spec = SmallSpec()) {
  const auto image = BuildModel(spec);
  Bytes bytes{GraphOf(*image), ParamOf(*image), {}};
  Must(weights::DecodeGraph(bytes.graph, &bytes.file));
  return bytes;
}

Status OpenBytes(const std::string& graph, const std::string& param, ThreadPool* pool = nullptr,
                 bool verify = true) {
  return ModelReader::OpenImage(std::make_shared<FakeImage>(graph, param), pool, verify).status();
}

// Opens `file` with the header and checksum that a writer would give it.
Status OpenFile(const proto::ModelFile& file, const std::string& param) {
  return OpenBytes(weights::EncodeGraph(file), param);
}

std::string WithHeader(std::string param, const weights::ParamHeader& header) {
  const auto bytes = weights::EncodeParamHeader(header);
  std::memcpy(param.data(), bytes.data(), bytes.size());
  return param;
}

TEST(ModelReader, FindsTensorsByName) {
  const auto image = BuildModel(SmallSpec());
  auto reader = ModelReader::OpenImage(image, nullptr);
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ((*reader)->source(), "memory image");
  EXPECT_EQ((*reader)->spec().architecture(), "SmallForCausalLM");
  EXPECT_EQ((*reader)->file().build().options().at("a"), "1");
  ExpectError((*reader)->Find("nothing").status(), StatusCode::kNotFound,
              {"\"nothing\"", "memory image"});
  EXPECT_EQ((*reader)->Find("final_norm").value().shape[0], 4);
}

TEST(ModelReader, KeepsTheImageAlive) {
  auto image = BuildModel(SmallSpec());
  const unsigned char* param = image->param();
  auto reader = ModelReader::OpenImage(image, nullptr);
  ASSERT_TRUE(reader.ok());
  image.reset();
  EXPECT_EQ(std::memcmp(param, "ASPARAM", 8), 0);
}

TEST(ModelReader, DescribesAModel) {
  const auto image = BuildModel(OddSpec(proto::COMPUTE_BFLOAT16));
  auto reader = ModelReader::OpenImage(image, nullptr);
  ASSERT_TRUE(reader.ok());
  const std::string text = DescribeModel(**reader);
  for (const char* part :
       {"format_version: 1", "architecture: OddForCausalLM", "vocab_size: 37",
        "compute_type: COMPUTE_BFLOAT16", "layer_window: [0, 16]", "build.version: 1.2.3",
        "build.options.a: 1", "tensor layers.1.qkv: bfloat16 [110, 18] panel64 offset "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

// ---- Paths ----

TEST(ModelReaderPaths, EveryBadPathIsAStatusThatNamesIt) {
  const TempDir dir;
  BuildModel(SmallSpec(), DType::kFloat32, nullptr, dir / "m");
  const std::string graph = dir / "m.asgraph";
  const std::string param = dir / "m.asparam";
  ASSERT_EQ(mkdir((dir / "folder").c_str(), 0777), 0);
  ASSERT_EQ(mkfifo((dir / "fifo").c_str(), 0666), 0);
  ASSERT_EQ(symlink("loop", (dir / "loop").c_str()), 0);
  WriteFile(dir / "empty", "");
  const std::vector<std::tuple<std::string, StatusCode, std::string>> cases = {
      {dir / "missing", StatusCode::kNotFound, "No such file"},
      {dir / "folder", StatusCode::kInvalidArgument, "a directory"},
      {dir / "fifo", StatusCode::kInvalidArgument, "a FIFO"},
      {dir / "loop", StatusCode::kInvalidArgument, "symbolic links"},
      {dir / "empty", kDamaged, "is empty"},
      {graph + "/x", StatusCode::kInvalidArgument, "Not a directory"},
      {"/dev/zero", StatusCode::kInvalidArgument, "a device"},
      {"", StatusCode::kNotFound, "No such file"},
  };
  for (const auto& [path, code, reason] : cases) {
    ExpectError(ModelReader::OpenFiles(path, param, nullptr).status(), code, {path, reason});
    ExpectError(ModelReader::OpenFiles(graph, path, nullptr).status(), code, {path, reason});
  }
  if (geteuid() != 0) {
    chmod(param.c_str(), 0);
    ExpectError(ModelReader::OpenFiles(graph, param, nullptr).status(),
                StatusCode::kFailedPrecondition, {param, "ermission"});
  }
}

TEST(ModelReaderPaths, FollowsSymbolicLinksAndNamesTheFileInErrors) {
  const TempDir dir;
  BuildModel(SmallSpec(), DType::kFloat32, nullptr, dir / "m");
  ASSERT_EQ(symlink("m.asgraph", (dir / "lg").c_str()), 0);
  ASSERT_EQ(symlink("m.asparam", (dir / "lp").c_str()), 0);
  auto reader = ModelReader::OpenFiles(dir / "lg", dir / "lp", nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  EXPECT_EQ((*reader)->source(), dir / "lg");
  // One file in both roles.
  ExpectError(ModelReader::OpenFiles(dir / "lg", dir / "lg", nullptr).status(), kDamaged, {"/lg"});
  ExpectError(ModelReader::OpenFiles(dir / "lp", dir / "lp", nullptr).status(), kDamaged,
              {"/lp", "not a graph", "offset 0"});
  // Replacing the files makes new ones: the open model still reads the old files.
  BuildModel(OddSpec(proto::COMPUTE_FLOAT32), DType::kFloat32, nullptr, dir / "m");
  EXPECT_EQ((*reader)->Find("final_norm").value().shape[0], 4);
}

TEST(ModelReaderPaths, MappedPagesAreGivenBackAndReadAgain) {
  proto::DecoderSpec spec = SmallSpec();
  spec.set_vocab_size(1 << 20);
  const int64_t bytes = (int64_t{1} << 20) * spec.hidden_size() * 4;
  const TempDir dir;
  BuildModel(spec, DType::kFloat32, nullptr, dir / "m");
  auto reader = ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status().ToString();
  const WeightView view = (*reader)->Find("embedding").value();
  ASSERT_GE(view.bytes, bytes);
  const auto* data = static_cast<const unsigned char*>(view.data);
  const std::vector<unsigned char> before(data, data + view.bytes);
  const int64_t opened = ReadMemoryUsage().file_bytes;
  (*reader)->ReleasePages();
  EXPECT_LE(ReadMemoryUsage().file_bytes, opened - bytes * 9 / 10);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), data));
  EXPECT_GE(ReadMemoryUsage().file_bytes, opened - bytes / 10);
}

TEST(ModelReaderPaths, AHugeGraphIsRefusedUnread) {
  const TempDir dir;
  BuildModel(SmallSpec(), DType::kFloat32, nullptr, dir / "m");
  ASSERT_EQ(truncate((dir / "m.asgraph").c_str(), int64_t{1} << 40), 0);
  ExpectError(ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", nullptr).status(),
              kDamaged, {"m.asgraph", "at most"});
}

// ---- Damage that checksums find ----

TEST(ModelReaderDamage, EveryBitOfTheGraphCounts) {
  const Bytes good = GoodBytes();
  for (size_t at = 0; at < good.graph.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string graph = good.graph;
      graph[at] = static_cast<char>(graph[at] ^ (1 << bit));
      ASSERT_FALSE(OpenBytes(graph, good.param).ok()) << at;
    }
  }
}

TEST(ModelReaderDamage, EveryByteOfTheParametersCounts) {
  ThreadPool pool(2);
  for (const auto& spec : {SmallSpec(), OddSpec(proto::COMPUTE_BFLOAT16)}) {
    const Bytes good = GoodBytes(spec);
    auto image = std::make_shared<FakeImage>(good.graph, good.param);
    ASSERT_TRUE(ModelReader::OpenImage(image, &pool).ok());
    auto* param = const_cast<unsigned char*>(image->param());
    for (size_t at = 0; at < good.param.size(); at += at < 4200 ? 1 : 13) {
      param[at] ^= 0x10;
      const Status status = ModelReader::OpenImage(image, &pool).status();
      param[at] ^= 0x10;
      ASSERT_FALSE(status.ok()) << at;
      // The message names the tensor whose bytes or padding contain the changed byte.
      for (const proto::TensorRecord& record : good.file.tensors()) {
        const uint64_t end = record.offset() + (record.bytes() + 4095) / 4096 * 4096;
        if (at >= record.offset() && at < end) {
          ExpectError(status, kDamaged, {"\"" + record.name() + "\""});
        }
      }
    }
    EXPECT_TRUE(ModelReader::OpenImage(image, &pool).ok());
  }
}

TEST(ModelReaderDamage, WithoutVerifyOnlyStructureIsChecked) {
  Bytes bytes = GoodBytes();
  bytes.param[5000] ^= 1;
  EXPECT_FALSE(OpenBytes(bytes.graph, bytes.param).ok());
  EXPECT_TRUE(OpenBytes(bytes.graph, bytes.param, nullptr, false).ok());
  bytes.param[0] ^= 1;
  EXPECT_FALSE(OpenBytes(bytes.graph, bytes.param, nullptr, false).ok());
}

TEST(ModelReaderDamage, EveryTruncationIsRefused) {
  const TempDir dir;
  const Bytes good = GoodBytes();
  WriteFile(dir / "p", good.param);
  for (size_t size = 0; size < good.graph.size(); ++size) {
    ASSERT_FALSE(OpenBytes(good.graph.substr(0, size), good.param).ok()) << size;
    if (size % 16 != 0) continue;  // Files are slow, and are read by the same code.
    WriteFile(dir / "g", good.graph.substr(0, size));
    ExpectError(ModelReader::OpenFiles(dir / "g", dir / "p", nullptr).status(), kDamaged, {"/g"});
  }
  WriteFile(dir / "g", good.graph);
  for (size_t boundary = 0; boundary <= good.param.size();
       boundary += boundary < 64 ? 8 : 4032 + 64 * (boundary % 4096 == 0)) {
    for (const size_t size : {boundary - 1, boundary, boundary + 1}) {
      if (size >= good.param.size()) continue;
      ASSERT_EQ(truncate((dir / "p").c_str(), static_cast<off_t>(size)), 0);
      const auto verify = size % 2 == 0;
      ExpectError(ModelReader::OpenFiles(dir / "g", dir / "p", nullptr, verify).status(), kDamaged,
                  {"/p"});
      WriteFile(dir / "p", good.param);
    }
  }
  ExpectError(OpenBytes(good.graph, good.param.substr(0, 8192)), kDamaged,
              {"has 8192 bytes", "cut off"});
  // A file that is too long is refused, too.
  ExpectError(OpenBytes(good.graph, good.param + std::string(4096, '\0')), kDamaged,
              {"has 40960 bytes", "36864"});
  EXPECT_FALSE(OpenBytes(good.graph + "x", good.param).ok());
}

TEST(ModelReaderDamage, APairThatDoesNotBelongTogether) {
  const Bytes a = GoodBytes();
  proto::DecoderSpec spec = SmallSpec();
  spec.set_norm_eps(2e-5f);  // The same sizes and tensors.
  const Bytes b = GoodBytes(spec);
  ASSERT_EQ(a.param.size(), b.param.size());
  ExpectError(OpenBytes(a.graph, b.param), kDamaged, {"belongs to another graph", "offset 16"});
  ExpectError(OpenBytes(b.graph, a.param), kDamaged, {"belongs to another graph"});
}

// ---- Headers ----

TEST(ModelReaderHeaders, NewerVersionsSayWhatToDo) {
  const Bytes good = GoodBytes();
  std::string graph = good.graph;
  graph[8] = 9;
  ExpectError(OpenBytes(graph, good.param), StatusCode::kUnimplemented,
              {"written by a newer version (format 9)", "this build reads up to 8"});
  ExpectError(OpenBytes(good.graph, WithHeader(good.param, {9, 0, good.file.file_id(), 36864})),
              StatusCode::kUnimplemented, {"(format 9)", "up to 8"});
  graph[8] = 0;
  ExpectError(OpenBytes(graph, good.param), kDamaged, {"version 0"});
}

TEST(ModelReaderHeaders, EveryFieldIsChecked) {
  const Bytes good = GoodBytes();
  const uint64_t id = good.file.file_id();
  const uint64_t size = good.file.param_bytes();
  ASSERT_TRUE(OpenBytes(good.graph, WithHeader(good.param, {1, 0, id, size})).ok());
  ExpectError(OpenBytes(good.graph, WithHeader(good.param, {1, 4, id, size})), kDamaged,
              {"flags 0x0000000000000004", "offset 12"});
  ExpectError(OpenBytes(good.graph, WithHeader(good.param, {1, 0, id + 1, size})), kDamaged,
              {"another graph"});
  ExpectError(OpenBytes(good.graph, WithHeader(good.param, {1, 0, id, size + 4096})), kDamaged,
              {"offset 24", "40960"});
  std::string param = good.param;
  param[63] ^= 1;
  ExpectError(OpenBytes(good.graph, param), kDamaged, {"offset 56"});
  param = good.param;
  param[4095] = 1;
  ExpectError(OpenBytes(good.graph, param), kDamaged, {"padding", "offset 4095"});
  std::string graph = good.graph;
  graph[12] = 1;
  ExpectError(OpenBytes(graph, good.param), kDamaged, {"flags"});
  proto::ModelFile file = good.file;
  file.set_format_version(1);
  std::string rewritten = weights::EncodeGraph(file);
  EXPECT_EQ(rewritten, good.graph);
}

// Earlier writers gave these fields no version of their own.
TEST(ModelReaderHeaders, LatentsAndLimitsMayHaveAnOlderVersion) {
  proto::DecoderSpec limited = SmallSpec();
  limited.set_qkv_limit(2.0f);
  proto::DecoderSpec quantized = TinyLatentSpec();
  proto::DecoderSpec latent = quantized;
  latent.clear_weight_quant();
  for (const auto& [spec, version] : {std::pair{limited, 1u}, {latent, 1u}, {quantized, 2u}}) {
    const Bytes written = GoodBytes(spec);
    EXPECT_EQ(written.file.format_version(), 3u);
    proto::ModelFile file = written.file;
    file.set_format_version(version);
    const weights::ParamHeader header{version, 0, file.file_id(), file.param_bytes()};
    EXPECT_TRUE(OpenFile(file, WithHeader(written.param, header)).ok()) << spec.architecture();
  }
}

TEST(ModelReaderHeaders, AMisalignedImageIsRefused) {
  class Shifted final : public ModelImage {
   public:
    explicit Shifted(const Bytes& bytes) : graph_(bytes.graph), inner_("", " " + bytes.param) {}
    std::string_view graph() const override { return graph_; }
    const unsigned char* param() const override { return inner_.param() + 1; }
    int64_t param_bytes() const override { return inner_.param_bytes() - 1; }

   private:
    std::string graph_;
    FakeImage inner_;
  };
  ExpectError(ModelReader::OpenImage(std::make_shared<Shifted>(GoodBytes()), nullptr).status(),
              StatusCode::kInvalidArgument, {"64-byte aligned"});
  ExpectError(ModelReader::OpenImage(nullptr, nullptr).status(), StatusCode::kInvalidArgument,
              {"null"});
}

// ---- Forged graphs, with a right checksum ----

struct Forgery {
  std::function<void(proto::ModelFile&)> change;
  std::vector<std::string> message;
};

TEST(ModelReaderForgeries, EveryInconsistencyIsNamed) {
  using F = proto::ModelFile;
  // Records of SmallSpec: 0 embedding, 1 attention_norm, 2 qkv, 3 o, 4 mlp_norm, ... 7 final_norm.
  const std::vector<Forgery> forgeries = {
      {[](F& f) { f.mutable_tensors(1)->set_offset(4096); },
       {"\"layers.0.attention_norm\"", "offset 4096", "overlaps"}},
      {[](F& f) { f.mutable_tensors(1)->set_offset(f.tensors(2).offset()); }, {"unexplained"}},
      {[](F& f) { f.mutable_tensors(0)->set_offset(0); }, {"overlaps the header"}},
      {[](F& f) { f.mutable_tensors(2)->set_offset(f.tensors(2).offset() + 64); },
       {"\"layers.0.qkv\"", "multiple of 4096"}},
      {[](F& f) { f.mutable_tensors(7)->set_offset(uint64_t{1} << 40); },
       {"\"final_norm\"", "unexplained"}},
      {[](F& f) { f.mutable_tensors(7)->set_offset(UINT64_MAX - 4095); }, {"unexplained"}},
      {[](F& f) { f.mutable_tensors(0)->set_bytes(UINT64_MAX); },
       {"\"embedding\"", "18446744073709551615 bytes", "require 1024"}},
      {[](F& f) { f.mutable_tensors(0)->set_bytes(1020); }, {"takes 1020 bytes"}},
      {[](F& f) { f.mutable_tensors(0)->set_dtype(9); },
       {"is bfloat16; the spec requires float32"}},
      {[](F& f) { f.mutable_tensors(0)->set_dtype(77); }, {"is dtype 77"}},
      {[](F& f) { f.mutable_tensors(0)->set_layout(proto::ROW_MAJOR); }, {"layout 0"}},
      {[](F& f) { f.mutable_tensors(0)->set_layout(static_cast<proto::Layout>(5)); }, {"layout 5"}},
      {[](F& f) { f.mutable_tensors(0)->set_shape(0, 6); }, {"shape [6, 4]", "[5, 4]"}},
      {[](F& f) { f.mutable_tensors(0)->set_shape(0, -5); }, {"shape [-5, 4]"}},
      {[](F& f) { f.mutable_tensors(0)->add_shape(1); }, {"shape [5, 4, 1]"}},
      {[](F& f) {
         for (int i = 0; i < 100; ++i) f.mutable_tensors(0)->add_shape(INT64_MAX);
       },
       {"of rank 102"}},
      {[](F& f) { f.mutable_tensors(0)->clear_shape(); }, {"shape []"}},
      {[](F& f) { f.mutable_tensors(1)->set_name("embedding"); }, {"\"embedding\"", "twice"}},
      {[](F& f) { f.mutable_tensors(1)->set_name("odd"); }, {"\"odd\"", "not required"}},
      {[](F& f) { f.mutable_tensors(1)->set_name(""); }, {"not required"}},
      {[](F& f) { *f.add_tensors() = f.tensors(7); }, {"twice"}},
      {[](F& f) { f.add_tensors(); }, {"not required"}},
      {[](F& f) { f.mutable_tensors()->RemoveLast(); }, {"\"final_norm\" is missing"}},
      {[](F& f) { f.clear_tensors(); }, {"is missing, and 7 more"}},
      {[](F& f) { f.mutable_tensors(3)->set_checksum(1); },
       {"\"layers.0.o\"", "checksum", "damaged"}},
      {[](F& f) { f.set_param_bytes(4096); }, {"offset 24"}},
      {[](F& f) { f.set_param_bytes(0); }, {"offset 24"}},
      {[](F& f) { f.set_file_id(1); }, {"another graph"}},
      {[](F& f) { f.mutable_spec()->set_hidden_size(INT64_MAX); }, {"spec: hidden_size is 9223"}},
      {[](F& f) { f.mutable_spec()->set_num_layers(4096); }, {"is missing"}},
      {[](F& f) { f.mutable_spec()->set_vocab_size((int64_t{1} << 32) + 5); }, {"vocab_size is"}},
      {[](F& f) { f.mutable_spec()->set_num_kv_heads(2); }, {"\"layers.0.qkv\"", "[12, 4]"}},
      {[](F& f) { f.clear_spec(); }, {"spec: vocab_size is 0"}},
      {[](F& f) { f.mutable_spec()->set_tie_embeddings(false); }, {"\"embedding\"", "layout"}},
      {[](F& f) { f.mutable_spec()->set_compute_type(proto::COMPUTE_BFLOAT16); },
       {"is float32; the spec requires bfloat16"}},
  };
  const Bytes good = GoodBytes();
  ASSERT_EQ(good.file.tensors(7).name(), "final_norm");
  for (const Forgery& forgery : forgeries) {
    proto::ModelFile file = good.file;
    forgery.change(file);
    ExpectError(OpenFile(file, good.param), kDamaged, forgery.message);
  }
}

TEST(ModelReaderForgeries, SwappedOffsetsOfEqualTensorsFailTheChecksum) {
  const Bytes good = GoodBytes();
  proto::ModelFile file = good.file;
  const uint64_t a = file.tensors(1).offset();
  file.mutable_tensors(1)->set_offset(file.tensors(7).offset());
  file.mutable_tensors(7)->set_offset(a);
  // Any order of tensors is legal, but these bytes are not at the records' offsets.
  ExpectError(OpenFile(file, good.param), kDamaged, {"checksum"});
  std::string param = good.param;
  std::swap_ranges(param.begin() + static_cast<int64_t>(a),
                   param.begin() + static_cast<int64_t>(a) + 4096,
                   param.begin() + static_cast<int64_t>(file.tensors(1).offset()));
  EXPECT_TRUE(OpenFile(file, param).ok());
}

// Opens a graph with a right header and checksum around bytes that are no message, or a costly one.
Status OpenMessage(const std::string& message) {
  std::string graph(weights::kGraphMagic, 8);
  graph += std::string("\x01\0\0\0\0\0\0\0", 8) + message;
  const uint64_t checksum = weights::Hash64(graph.data(), static_cast<int64_t>(graph.size()));
  graph.append(reinterpret_cast<const char*>(&checksum), 8);
  return OpenBytes(graph, std::string(4096, '\0'));
}

TEST(ModelReaderForgeries, MessagesThatDoNotParseOrCostTooMuch) {
  ExpectError(OpenMessage(""), kDamaged, {"format_version is 0"});
  ExpectError(OpenMessage("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), kDamaged, {});
  ExpectError(OpenMessage(std::string("\x1a\xff\xff\xff\xff\x0f", 6)), kDamaged, {"malformed"});
  ExpectError(OpenMessage(std::string(200, '\x1b')), kDamaged, {"malformed"});  // groups
  std::string records;
  for (int i = 0; i < 140000; ++i) records += std::string("\x1a\0", 2);
  ExpectError(OpenMessage(records), kDamaged, {"more than 131072 tensor records"});
  std::string nested(100000, '\x12');  // spec in spec in spec, of impossible lengths
  ExpectError(OpenMessage(nested), kDamaged, {});
}

TEST(ModelReaderFiles, AFileThatShrinksWhileOpenIsCaughtByTheNextOpen) {
  const TempDir dir;
  BuildModel(SmallSpec(), DType::kFloat32, nullptr, dir / "m");
  auto reader = ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", nullptr);
  ASSERT_TRUE(reader.ok());
  ASSERT_EQ(truncate((dir / "m.asparam").c_str(), 8192), 0);
  ExpectError(ModelReader::OpenFiles(dir / "m.asgraph", dir / "m.asparam", nullptr).status(),
              kDamaged, {"m.asparam", "cut off"});
}

}  // namespace
}  // namespace allspark::testing
