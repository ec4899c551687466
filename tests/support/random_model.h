// Small random models for C++ tests of the decoder and the engine: specs that cover what decoders
// differ in, and images built through the model writer. The same spec and seed give the same
// weights everywhere.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "allspark/status.h"
#include "weights/model_reader.h"
#include "weights/model_writer.h"

namespace allspark::testing {

// Two layers, hidden 64, 4 query heads over 2 KV heads of 16, untied.
proto::DecoderSpec TinyLlamaSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Biases on qkv, tied embeddings, one KV head for 3 query heads, sizes that fill no panel.
proto::DecoderSpec TinyQwen2Spec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Query and key norms, heads wider than hidden / heads, tied embeddings.
proto::DecoderSpec TinyQwen3Spec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Sliding windows, one per layer (one layer full).
proto::DecoderSpec TinyMistralSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Every switch that the others leave alone: biases everywhere, partial interleaved rope with
// attention scaling, norms of heads that fill no vector, soft cap, own attention scale, tanh GELU.
proto::DecoderSpec TinyOddSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// All of the above.
std::vector<proto::DecoderSpec> TinySpecs(proto::ComputeType compute);

// The values of one required tensor, row-major, exactly as stored (rounded to its dtype).
std::vector<float> RandomTensor(const RequiredTensor& tensor, uint64_t seed);

// Throws std::runtime_error with the writer's message when the spec is refused.
std::shared_ptr<const ModelImage> MakeRandomModel(const proto::DecoderSpec& spec, uint64_t seed);

// The same, opened.
std::unique_ptr<ModelReader> OpenRandomModel(const proto::DecoderSpec& spec, uint64_t seed);

}  // namespace allspark::testing
