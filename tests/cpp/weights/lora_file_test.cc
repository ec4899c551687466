#include "weights/lora_file.h"

#include <functional>
#include <limits>

#include "allspark/model_serializer.h"
#include "cpp/weights/weights_test_util.h"
#include "weights/checksum.h"
#include "weights/lora_format.h"
#include "weights/wire.h"

namespace allspark::testing {
namespace {

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;

struct Pair {
  std::string tensor;
  int64_t row_begin, rows, cols, rank;
};

// Sizes that fill no block of 64 bytes, one matrix of several checksum pieces, and a fused tensor
// in parts that leave rows out.
const std::vector<Pair>& Pairs() {
  static const std::vector<Pair> pairs = {
      {"layers.0.qkv", 0, 24, 18, 3},  {"layers.0.qkv", 32, 8, 18, 1},
      {"layers.1.down", 0, 18, 70, 8}, {"lm_head", 0, 37, 18, 16},
      {"embedding", 0, 18, 37000, 9},
  };
  return pairs;
}

std::vector<float> Matrix(const Pair& pair, const char* name, int64_t features) {
  std::vector<float> values;
  for (int64_t i = 0; i < pair.rank * features; ++i) {
    values.push_back(ValueAt(pair.tensor + name, pair.row_begin, i));
  }
  return values;
}

Status Add(LoraSerializer& serializer, const Pair& pair) {
  return serializer.AddPair(pair.tensor, pair.row_begin, pair.rows, pair.cols, pair.rank,
                            Matrix(pair, "a", pair.cols), Matrix(pair, "b", pair.rows));
}

std::unique_ptr<LoraSerializer> NewSerializer(const std::string& path = "") {
  return Must(LoraSerializer::Create("", path));
}

std::shared_ptr<const LoraImage> Build(const std::vector<Pair>& pairs,
                                       const std::string& path = "") {
  auto serializer = NewSerializer(path);
  for (const Pair& pair : pairs) Must(Add(*serializer, pair));
  return Must(serializer->Finish());
}

std::string BytesOf(const LoraImage& image) {
  const auto bytes = image.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// An image whose bytes a test chooses.
class ChosenImage final : public LoraImage {
 public:
  explicit ChosenImage(std::string bytes, size_t shift = 0)
      : inner_("", std::string(shift, ' ') + bytes), shift_(shift) {}
  std::span<const unsigned char> bytes() const override {
    return {inner_.param() + shift_, static_cast<size_t>(inner_.param_bytes()) - shift_};
  }

 private:
  FakeImage inner_;
  size_t shift_;
};

Status Open(const std::string& bytes) {
  return LoraFile::OpenImage(std::make_shared<ChosenImage>(bytes)).status();
}

void ExpectPairs(const LoraFile& file, const std::vector<Pair>& pairs) {
  ASSERT_EQ(file.pairs().size(), pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    const LoraPair& read = file.pairs()[i];
    EXPECT_EQ(read.tensor, pairs[i].tensor);
    EXPECT_EQ(read.row_begin, pairs[i].row_begin);
    EXPECT_EQ(read.rows, pairs[i].rows);
    EXPECT_EQ(read.cols, pairs[i].cols);
    EXPECT_EQ(read.rank, pairs[i].rank);
    for (const auto& [at, expected] : {std::pair(read.a, Matrix(pairs[i], "a", pairs[i].cols)),
                                       std::pair(read.b, Matrix(pairs[i], "b", pairs[i].rows))}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 64, 0u);
      EXPECT_EQ(std::memcmp(at, expected.data(), expected.size() * sizeof(float)), 0);
    }
  }
}

TEST(LoraFile, GivesBackWhatWasWrittenToAFile) {
  const TempDir dir;
  EXPECT_EQ(Build(Pairs(), dir / "x.aslora"), nullptr);
  EXPECT_EQ(dir.Files(), std::vector<std::string>{"x.aslora"});
  auto file = LoraFile::Open(dir / "x.aslora");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ((*file)->source(), dir / "x.aslora");
  std::filesystem::remove(dir / "x.aslora");  // The open file is not needed any more.
  ExpectPairs(**file, Pairs());
}

TEST(LoraFile, AnImageHasTheSameBytesAndIsKeptAlive) {
  const TempDir dir;
  Build(Pairs(), dir / "x.aslora");
  auto image = Build(Pairs());
  EXPECT_TRUE(BytesOf(*image) == ReadFile(dir / "x.aslora"));
  auto file = LoraFile::OpenImage(image);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ((*file)->source(), "memory image");
  image.reset();
  ExpectPairs(**file, Pairs());
}

TEST(LoraFile, EveryBadPathIsAStatusThatNamesIt) {
  const TempDir dir;
  WriteFile(dir / "empty", "");
  WriteFile(dir / "short", "ASLORA");
  WriteFile(dir / "other", std::string(500, 'x'));
  ExpectError(LoraFile::Open(dir / "missing").status(), StatusCode::kNotFound, {"missing"});
  ExpectError(LoraFile::Open(dir.path()).status(), kInvalid, {dir.path(), "directory"});
  ExpectError(LoraFile::Open(dir / "empty").status(), kDamaged, {"/empty", "offset 0"});
  ExpectError(LoraFile::Open(dir / "short").status(), kDamaged, {"/short", "offset 6"});
  ExpectError(LoraFile::Open(dir / "other").status(), kDamaged, {"/other", "magic", "offset 0"});
  ExpectError(LoraFile::OpenImage(nullptr).status(), kInvalid, {"null"});
  const std::string good = BytesOf(*Build(Pairs()));
  ExpectError(LoraFile::OpenImage(std::make_shared<ChosenImage>(good, 1)).status(), kInvalid,
              {"64-byte aligned"});
}

// ---- Damage ----

TEST(LoraFileDamage, EveryFlippedBitIsFound) {
  std::string bytes = BytesOf(*Build({Pairs()[0], Pairs()[1]}));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= 0x10;
    EXPECT_FALSE(Open(bytes).ok()) << i;
    bytes[i] ^= 0x10;
  }
  EXPECT_TRUE(Open(bytes).ok());
}

TEST(LoraFileDamage, EveryTruncationIsRefused) {
  const TempDir dir;
  const std::string good = BytesOf(*Build({Pairs()[0], Pairs()[1]}));
  for (size_t size = 0; size < good.size(); ++size) {
    ExpectError(Open(good.substr(0, size)), kDamaged, {"memory image"});
    if (size % 64 > 1) continue;  // Files are slow, and are read by the same code.
    WriteFile(dir / "x", good.substr(0, size));
    ExpectError(LoraFile::Open(dir / "x").status(), kDamaged, {dir / "x"});
  }
  ExpectError(Open(good + "x"), kDamaged, {"offset 16"});
}

TEST(LoraFileDamage, NamesTensorAndOffset) {
  const std::string good = BytesOf(*Build({Pairs()[0], Pairs()[1]}));
  // a: 3 * 18 floats from 64, b: 24 * 3 from 320; padding between.
  std::string bytes = good;
  bytes[64] ^= 1;
  ExpectError(Open(bytes), kDamaged, {"a of tensor \"layers.0.qkv\" at offset 64", "checksum"});
  bytes = good;
  bytes[320] ^= 1;
  ExpectError(Open(bytes), kDamaged, {"b of tensor \"layers.0.qkv\" at offset 320", "checksum"});
  bytes = good;
  bytes[319] = 1;
  ExpectError(Open(bytes), kDamaged, {"padding", "offset 319"});
  bytes = good;
  bytes[bytes.size() - 1] ^= 1;
  ExpectError(Open(bytes), kDamaged, {"the index at offset", "checksum"});
  bytes = good;
  bytes[8] = 9;
  ExpectError(Open(bytes), StatusCode::kUnimplemented, {"format 9", "reads up to 1"});
  bytes = good;
  bytes[12] = 1;
  ExpectError(Open(bytes), kDamaged, {"flags", "offset 12"});
}

// ---- Forgeries: files with right checksums that no writer writes ----

std::string WithLoraHeader(std::string bytes, weights::LoraHeader header) {
  const auto encoded = weights::EncodeLoraHeader(header);
  std::memcpy(bytes.data(), encoded.data(), encoded.size());
  return bytes;
}

// A file of `tensors` (which begin after the header) and an index.
std::string WithIndex(const std::string& tensors, const std::string& index) {
  const auto offset = weights::kLoraHeaderBytes + tensors.size();
  return WithLoraHeader(std::string(weights::kLoraHeaderBytes, '\0') + tensors + index,
                        {offset + index.size(), offset, index.size(),
                         weights::Hash64(index.data(), static_cast<int64_t>(index.size()))});
}

struct Good {
  std::string tensors;
  proto::LoraIndex index;
};

Good GoodParts() {
  const std::string bytes = BytesOf(*Build({Pairs()[0], Pairs()[1]}));
  const auto header = weights::DecodeLoraHeader(
      reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int64_t>(bytes.size()));
  Good good;
  good.tensors = bytes.substr(64, header.value().index_offset - 64);
  good.index.ParseFromString(bytes.substr(header.value().index_offset));
  return good;
}

TEST(LoraFileForgeries, EveryInconsistencyIsNamed) {
  using Index = proto::LoraIndex;
  struct Forgery {
    std::function<void(Index&)> change;
    std::vector<std::string> message;
  };
  const std::vector<Forgery> forgeries = {
      {[](Index& i) { i.mutable_records(0)->set_tensor(""); }, {"tensor is empty"}},
      {[](Index& i) { i.mutable_records(0)->set_rank(0); }, {"rank is 0", "[1, 4096]"}},
      {[](Index& i) { i.mutable_records(0)->set_rank(4097); }, {"rank is 4097"}},
      {[](Index& i) { i.mutable_records(0)->set_rank(INT64_MAX); }, {"rank is 9223"}},
      {[](Index& i) { i.mutable_records(0)->set_rows(-1); }, {"rows is -1"}},
      {[](Index& i) { i.mutable_records(0)->set_cols(INT64_MAX); }, {"cols is 9223"}},
      {[](Index& i) { i.mutable_records(0)->set_cols(1 << 30); }, {"a of tensor", "takes 12884"}},
      {[](Index& i) { i.mutable_records(1)->set_rows(1 << 30); },
       {"row_begin is 32; it must be in [0, 0]"}},
      {[](Index& i) { i.mutable_records(1)->set_row_begin(-8); }, {"row_begin is -8"}},
      {[](Index& i) { i.mutable_records(1)->set_row_begin(23); },
       {"rows [23, 31) share some with rows [0, 24)"}},
      {[](Index& i) { i.mutable_records(1)->set_rank(2); }, {"layers.0.qkv", "offset"}},
      {[](Index& i) { i.mutable_records(0)->set_a_checksum(1); }, {"a of tensor", "checksum"}},
      {[](Index& i) { i.mutable_records(1)->set_b_checksum(1); }, {"b of tensor", "checksum"}},
      {[](Index& i) { i.mutable_records()->RemoveLast(); }, {"the tensors end at offset"}},
      {[](Index& i) { i.mutable_records()->Clear(); }, {"the tensors end at offset 64"}},
      {[](Index& i) { *i.add_records() = i.records(1); }, {"share some with rows"}},
  };
  const Good good = GoodParts();
  ASSERT_TRUE(Open(WithIndex(good.tensors, good.index.SerializeAsString())).ok());
  for (const Forgery& forgery : forgeries) {
    proto::LoraIndex index = good.index;
    forgery.change(index);
    ExpectError(Open(WithIndex(good.tensors, index.SerializeAsString())), kDamaged,
                forgery.message);
  }
}

TEST(LoraFileForgeries, HeadersAndMessages) {
  const Good good = GoodParts();
  const std::string index = good.index.SerializeAsString();
  const std::string bytes = WithIndex(good.tensors, index);
  const uint64_t size = bytes.size();
  const uint64_t offset = size - index.size();
  ExpectError(Open(WithLoraHeader(bytes, {size + 1, offset, index.size(), 0})), kDamaged,
              {"offset 16", "cut off"});
  ExpectError(Open(WithLoraHeader(bytes, {size, 0, size, 0})), kDamaged, {"offset 24"});
  ExpectError(Open(WithLoraHeader(bytes, {size, offset, UINT64_MAX, 0})), kDamaged, {"offset 24"});
  ExpectError(Open(WithLoraHeader(bytes, {size, UINT64_MAX, size, 0})), kDamaged, {"offset 24"});
  ExpectError(Open(WithIndex(good.tensors, std::string((16 << 20) + 1, 'x'))), kDamaged,
              {"at most 16777216"});
  ExpectError(Open(WithIndex(good.tensors, "")), kDamaged, {"the tensors end at offset 64"});
  ExpectError(Open(WithIndex(good.tensors, std::string(200, '\x0b'))), kDamaged, {"malformed"});
  ExpectError(Open(WithIndex(good.tensors, std::string("\x0a\x02\x0a\x05", 4))), kDamaged,
              {"does not parse"});
  std::string records;
  for (int i = 0; i < 140000; ++i) records += std::string("\x0a\0", 2);
  ExpectError(Open(WithIndex("", records)), kDamaged, {"more than 131072 records"});
  std::string padded = bytes;
  padded[48] = 1;
  const uint64_t checksum = weights::Hash64(padded.data(), 56);
  std::memcpy(padded.data() + 56, &checksum, 8);
  ExpectError(Open(padded), kDamaged, {"padding", "offset 48"});
}

// ---- Writing ----

TEST(LoraSerializer, RefusesWhatDoesNotFitAndGoesOn) {
  auto serializer = NewSerializer();
  ExpectError(serializer->Finish().status(), StatusCode::kFailedPrecondition, {"no pairs"});
  ASSERT_TRUE(Add(*serializer, Pairs()[0]).ok());
  const std::vector<float> a(6, 1.0f), b(8, 1.0f);
  const auto add = [&](const std::string& tensor, int64_t row_begin, std::vector<float> values_a) {
    return serializer->AddPair(tensor, row_begin, 4, 3, 2, values_a, b);
  };
  ExpectError(add("", 0, a), kInvalid, {"tensor is empty"});
  ExpectError(add("\xff", 0, a), kInvalid, {"UTF-8"});
  ExpectError(add("x", -1, a), kInvalid, {"\"x\"", "row_begin is -1"});
  ExpectError(add("layers.0.qkv", 20, a), kInvalid, {"rows [20, 24) share some with rows [0, 24)"});
  ExpectError(add("x", 0, std::vector<float>(7)), kInvalid, {"a has 7 values", "have 6"});
  ExpectError(serializer->AddPair("x", 0, 5, 3, 2, a, b), kInvalid, {"b has 8 values", "have 10"});
  ExpectError(serializer->AddPair("x", 0, 4, 3, 0, a, b), kInvalid, {"rank is 0"});
  std::vector<float> bad = a;
  bad[5] = std::numeric_limits<float>::quiet_NaN();
  ExpectError(add("x", 0, bad), kInvalid, {"\"x\": a is NaN at value 5"});
  bad[5] = -std::numeric_limits<float>::infinity();
  ExpectError(add("x", 0, bad), kInvalid, {"a is infinite at value 5"});
  ASSERT_TRUE(Add(*serializer, Pairs()[1]).ok());
  auto image = serializer->Finish();
  ASSERT_TRUE(image.ok()) << image.status().ToString();
  EXPECT_TRUE(BytesOf(**image) == BytesOf(*Build({Pairs()[0], Pairs()[1]})));
  ExpectError(Add(*serializer, Pairs()[2]), StatusCode::kFailedPrecondition, {"finished"});
  ExpectError(serializer->Finish().status(), StatusCode::kFailedPrecondition, {"finished"});
}

TEST(LoraSerializer, LeavesNothingBehindUnlessFinished) {
  const TempDir dir;
  {
    auto serializer = NewSerializer(dir / "x.aslora");
    ASSERT_TRUE(Add(*serializer, Pairs()[0]).ok());
    EXPECT_FALSE(std::filesystem::exists(dir / "x.aslora"));
  }
  EXPECT_TRUE(dir.Files().empty());
  ExpectError(LoraSerializer::Create("", dir / "no/where").status(), StatusCode::kNotFound,
              {"no/where"});
  ExpectError(LoraSerializer::Create("\xff\xff", "").status(), kInvalid, {"BuildRecord"});
}

}  // namespace
}  // namespace allspark::testing
