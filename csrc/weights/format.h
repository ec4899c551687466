// The constants and the arithmetic of the serialised model's layout, shared by reader and writer:
// headers, alignment, and where each tensor of a spec lies. Private to weights/, but for what
// kernels must agree with (model/decoder_shape.cc). Format: weights/README.md. Pure functions of
// their arguments; any thread.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "allspark/status.h"
#include "base/int_math.h"
#include "weights/required_tensors.h"
#include "weights/wire.h"

namespace allspark::weights {

static_assert(std::endian::native == std::endian::little,
              "The format is little-endian and tensors are mapped in place.");

inline constexpr uint32_t kFormatVersion = 8;  // The newest that this build reads and writes.
// The version to write a model in: the oldest that can hold it.
uint32_t FormatVersionOf(const proto::DecoderSpec& spec);
// The oldest version that a file of this spec may have: not every writer took the one above.
uint32_t OldestVersionOf(const proto::DecoderSpec& spec);
// Whether the weight has a form of version 6 or 7, which floats are not quantised to here.
bool IsMadeElsewhere(const proto::WeightQuant& quant);
inline constexpr char kGraphMagic[kMagicBytes] = {'A', 'S', 'G', 'R', 'A', 'P', 'H', '\0'};
inline constexpr char kParamMagic[kMagicBytes] = {'A', 'S', 'P', 'A', 'R', 'A', 'M', '\0'};
inline constexpr int64_t kGraphHeaderBytes = 16;
inline constexpr int64_t kGraphChecksumBytes = 8;
// Far above any real graph (4096 layers need 10 MB); a bigger file is refused before it is read.
inline constexpr int64_t kMaxGraphBytes = 16 << 20;
// More than the largest legal spec requires; a file with more records is refused before parsing.
inline constexpr int64_t kMaxTensorRecords = 1 << 17;
inline constexpr int64_t kMaxWeightQuants = 1 << 15;
inline constexpr int64_t kTensorAlignment = 4096;
inline constexpr int64_t kParamHeaderBytes = kTensorAlignment;  // 64 bytes of content, zero padding
inline constexpr int64_t kPanelColumns = 64;
// Input features that share a float16 of scale_codes.
inline constexpr int64_t kScaleBlock = 256;
// Bytes of one 32-bit lane of a PANEL64 panel.
inline constexpr int64_t kLaneBytes = 4;
// One k group of a PANEL64 panel: 64 columns x 4 bytes.
inline constexpr int64_t kSlotBytes = kPanelColumns * kLaneBytes;
// A tensor's checksum is computed over pieces of this size, so that threads can share one tensor.
inline constexpr int64_t kPieceBytes = 1 << 20;
static_assert(kPieceBytes % kSlotBytes == 0, "A piece ends between two k groups.");

// A dtype's name for messages; also for values without an enumerator.
std::string StoredDTypeName(int32_t dtype);
const char* LayoutName(proto::Layout layout);

// The contiguous elements of one column of a panel; in ROW_MAJOR, one element.
struct Lane {
  int64_t bytes = 0;
  int64_t elements = 0;
};
// Requires: a dtype that files may hold.
Lane LaneOf(DType dtype, proto::Layout layout);

inline bool IsPanels(proto::Layout layout) { return layout != proto::ROW_MAJOR; }

// The zero point of a symmetric weight.
constexpr uint8_t SymmetricZero(int32_t bits) { return static_cast<uint8_t>(1 << (bits - 1)); }

// Bytes of a tensor in its stored layout, padding columns included. InvalidArgument on overflow.
Result<int64_t> StoredBytes(const RequiredTensor& tensor);

// The place of every required tensor: in list order, each at the next multiple of kTensorAlignment.
struct FilePlan {
  std::vector<int64_t> offsets;
  std::vector<int64_t> bytes;
  int64_t param_bytes = 0;  // a multiple of kTensorAlignment
};
Result<FilePlan> PlanFile(const std::vector<RequiredTensor>& tensors);

// "[3, 4]".
template <typename Range>
std::string ShapeString(const Range& shape) {
  std::string text = "[";
  for (const auto dim : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  return text + "]";
}

// The 64 bytes that open NAME.asparam.
struct ParamHeader {
  uint32_t version = 0;
  uint32_t flags = 0;
  uint64_t file_id = 0;
  uint64_t param_bytes = 0;
};
inline constexpr int64_t kParamHeaderContentBytes = 64;
std::array<unsigned char, kParamHeaderContentBytes> EncodeParamHeader(const ParamHeader& header);
// `bytes`: at least kParamHeaderBytes. DataLoss or Unimplemented, with the offset; the caller adds
// the file's name.
Result<ParamHeader> DecodeParamHeader(const unsigned char* bytes);

// Header + message + checksum: the whole of NAME.asgraph.
std::string EncodeGraph(const proto::ModelFile& file);
// Errors as DecodeParamHeader's. `file` should be in an arena: if parsing runs out of memory, a
// message outside an arena may leak its parts.
Status DecodeGraph(std::string_view bytes, proto::ModelFile* file);

// The number that ties a graph to its parameters: a hash of the spec, and of names and checksums of
// all tensors.
uint64_t ComputeFileId(const proto::ModelFile& file);

}  // namespace allspark::weights
