// Small random models for C++ tests of the decoder and the engine: specs that cover the differences
// between decoders, and images built by the model writer. The same spec and seed give the same
// weights everywhere.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "allspark/status.h"
#include "weights/model_reader.h"
#include "weights/model_writer.h"
#include "weights/required_tensors.h"

namespace allspark::testing {

// Two layers, hidden 64, 4 query heads over 2 KV heads of 16, untied.
proto::DecoderSpec TinyLlamaSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Biases on qkv, tied embeddings, one KV head for 3 query heads, sizes that fill no panel.
proto::DecoderSpec TinyQwen2Spec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Query and key norms, heads wider than hidden / heads, tied embeddings.
proto::DecoderSpec TinyQwen3Spec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Sliding windows, one per layer (one layer full).
proto::DecoderSpec TinyMistralSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Every option that the other specs do not use: biases everywhere, partial interleaved rope with
// attention scaling, norms of heads that fill no vector, soft cap, own attention scale, tanh GELU.
proto::DecoderSpec TinyOddSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// Norms before and after attention and MLP, other rope frequencies for layers with a window, a
// scaled embedding, capped logits.
proto::DecoderSpec TinyGemmaSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Norms only after attention and MLP; query and key norms over all heads at once; scaled branches
// and logits.
proto::DecoderSpec TinyOlmoSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// LayerNorm, an MLP without a gate, attention and MLP in parallel with a norm each, biases
// everywhere and on the head; one layer with int8 activations in the MLP only.
proto::DecoderSpec TinyNeoxSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// The same, but attention and MLP in sequence, learned positions instead of rope, and a tied
// embedding.
proto::DecoderSpec TinyGpt2Spec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// ALiBi with a number of heads that is no power of two, LayerNorm without biases, one norm shared
// by attention and MLP, one after the embedding, a window.
proto::DecoderSpec TinyAlibiSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Experts in every layer, two of eight, whose weights sum to one.
proto::DecoderSpec TinyMixtralSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// A dense layer first, then experts: sigmoids with a bias, groups, a scale, and a shared expert.
proto::DecoderSpec TinyDeepseekSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// A shared expert with a gate, weights of 8 and 4 bits that differ between layers, norms before and
// after.
proto::DecoderSpec TinyQuantizedMoeSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Latent attention, with latents of queries too, and quantised weights.
proto::DecoderSpec TinyLatentSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Experts, LayerNorm without a bias, and limits that some queries, keys and values reach.
proto::DecoderSpec TinyDbrxSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// Weights of 8 and 4 bits, with and without zero points, groups and int8 activations; they differ
// between layers. The tied embedding is quantised too.
proto::DecoderSpec TinyQuantizedSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// Quantised weights with reordered columns: in every product that may be reordered, with and
// without int8 activations, and an untied head.
proto::DecoderSpec TinyReorderedSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// The same without a gate, with biases, and with attention and MLP in parallel after one norm.
proto::DecoderSpec TinyReorderedParallelSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// The same with latent attention.
proto::DecoderSpec TinyReorderedLatentSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// The quantised specs of above with scales for groups of activations.
proto::DecoderSpec TinyScaledSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
proto::DecoderSpec TinyScaledMoeSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
proto::DecoderSpec TinyScaledLatentSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// Offsets, tables, 6 bits, floats of 8 bits, groups of 16, scales of every type.
proto::DecoderSpec TinyFormsSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
proto::DecoderSpec TinyFormsMoeSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// All of the above: parameters of tests.
using TinySpecMaker = proto::DecoderSpec (*)(proto::ComputeType);
const std::vector<TinySpecMaker>& TinySpecMakers();
// The specs that they make.
std::vector<proto::DecoderSpec> TinySpecs(proto::ComputeType compute);

// The values that MakeRandomModel writes into one required tensor, row-major, rounded to its dtype;
// for a quantised tensor, the values before quantisation.
std::vector<float> RandomTensor(const RequiredTensor& tensor, uint64_t seed);

inline constexpr int64_t kNoLayer = std::numeric_limits<int64_t>::max();

// How a spec quantises `tensor`, or null.
const proto::WeightQuant* QuantOf(const proto::DecoderSpec& spec, const std::string& tensor);

// The weight that the stored integers, scales and zero points of `tensor` stand for, row-major.
std::vector<float> StoredWeight(const ModelReader& reader, const RequiredTensor& tensor);

// Throws std::runtime_error with the writer's message when the spec is refused. Layers from
// silent_from on add nothing to the residual stream: the model then acts as one with silent_from
// layers.
std::shared_ptr<const ModelImage> MakeRandomModel(const proto::DecoderSpec& spec, uint64_t seed,
                                                  int64_t silent_from = kNoLayer);

// The same, opened.
std::unique_ptr<ModelReader> OpenRandomModel(const proto::DecoderSpec& spec, uint64_t seed);

}  // namespace allspark::testing
