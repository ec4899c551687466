// A fuzz target: arbitrary bytes for the reader of LoRA adapters, as an image and as a file. An
// input is
//
//   mode (1 byte), index bytes (2 bytes, little-endian), index, matrices
//
// Mode bit 0: index and matrices get a matching header and right checksums, so that the later
// checks are reached; otherwise the rest of the input is the file. Bit 1: also opened as a file.
// Every adapter that opens must be readable to its last value.
#pragma once

#include <stdlib.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "allspark/model_serializer.h"
#include "fuzz/fuzz_input.h"
#include "weights/checksum.h"
#include "weights/lora_file.h"
#include "weights/lora_format.h"

namespace allspark::fuzz::lora_file {

class BytesImage final : public LoraImage {
 public:
  explicit BytesImage(const std::string& bytes) : bytes_(bytes) {}
  std::span<const unsigned char> bytes() const override { return {bytes_.data(), bytes_.size()}; }

 private:
  ExactBytes bytes_;
};

// An adapter file of `matrices`; the index gets the checksums of the matrices it places.
inline std::string Wrap(const std::string& message, const std::string& matrices) {
  std::string bytes(static_cast<size_t>(weights::kLoraHeaderBytes), '\0');
  bytes += matrices;
  std::string index_bytes = message;
  proto::LoraIndex index;
  if (index.ParseFromString(message)) {
    weights::LoraPlan plan;
    for (proto::LoraRecord& record : *index.mutable_records()) {
      const auto place = plan.Next(record);
      if (!place.ok() || place.value().end > static_cast<int64_t>(bytes.size())) break;
      plan.Add(record, place.value());
      const auto checksum = [&](int64_t offset, int64_t size) {
        return weights::TensorChecksum(bytes.data() + offset, size);
      };
      record.set_a_checksum(checksum(place.value().a_offset, place.value().a_bytes));
      record.set_b_checksum(checksum(place.value().b_offset, place.value().b_bytes));
    }
    index_bytes = index.SerializeAsString();
  }
  const auto header = weights::EncodeLoraHeader(
      {bytes.size() + index_bytes.size(), bytes.size(), index_bytes.size(),
       weights::Hash64(index_bytes.data(), static_cast<int64_t>(index_bytes.size()))});
  std::memcpy(bytes.data(), header.data(), header.size());
  return bytes + index_bytes;
}

// Whether the adapter opened.
inline bool UseAdapter(const Result<std::shared_ptr<const LoraFile>>& opened) {
  if (!opened.ok()) {
    if (opened.status().message().empty()) abort();
    return false;
  }
  volatile float sink = 0;
  for (const LoraPair& pair : opened.value()->pairs()) {
    for (int64_t i = 0; i < pair.rank * pair.cols; ++i) sink = pair.a[i];
    for (int64_t i = 0; i < pair.rank * pair.rows; ++i) sink = pair.b[i];
  }
  (void)sink;
  return true;
}

inline void WriteSeeds(const std::string& folder) {
  int count = 0;
  for (const int64_t num_pairs : {1, 3}) {
    auto serializer = LoraSerializer::Create("", "");
    for (int64_t i = 0; i < num_pairs; ++i) {
      const std::vector<float> a(6, 1.0f), b(4, 2.0f);
      Require((*serializer)->AddPair("layers.0.qkv", 2 * i, 2, 3, 2, a, b));
    }
    const auto image = (*serializer)->Finish();
    const auto bytes = image.value()->bytes();
    const std::string file(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const auto header = weights::DecodeLoraHeader(bytes.data(), static_cast<int64_t>(bytes.size()));
    const uint64_t index = header.value().index_offset;
    const std::string tensors = file.substr(64, index - 64);
    for (const Input& seed : {Input{2, "", file}, Input{3, file.substr(index), tensors}}) {
      WriteBytes(folder + "/seed-" + std::to_string(count++), seed.Bytes());
    }
  }
}

// Whether the input is a valid adapter.
inline bool Run(const uint8_t* data, size_t size) {
  const auto input = Input::Parse(data, size);
  if (!input) return false;
  const std::string bytes =
      input->mode & 1 ? Wrap(input->head, input->tail) : input->head + input->tail;
  bool opened = UseAdapter(LoraFile::OpenImage(std::make_shared<BytesImage>(bytes)));
  if (input->mode & 2) {
    const std::string path = ScratchFolder() + "/adapter";
    WriteBytes(path, bytes);
    opened = UseAdapter(LoraFile::Open(path)) || opened;
  }
  return opened;
}

}  // namespace allspark::fuzz::lora_file
