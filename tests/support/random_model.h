// Small random models for C++ tests of the decoder and the engine: specs that cover what decoders
// differ in, and images built through the model writer. The same spec and seed give the same
// weights everywhere.
#pragma once

#include <cstdint>
#include <limits>
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

// Norms before and after attention and MLP, frequencies of their own for layers with a window, a
// scaled embedding, capped logits.
proto::DecoderSpec TinyGemmaSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Norms after attention and MLP alone, and over all heads at once; scaled branches and logits.
proto::DecoderSpec TinyOlmoSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// LayerNorm, an MLP without a gate, attention and MLP beside each other with a norm each, biases
// everywhere, the head's too; one layer with int8 activations of the MLP alone.
proto::DecoderSpec TinyNeoxSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// The same one after the other, with learned positions and a tied embedding, and no rope.
proto::DecoderSpec TinyGpt2Spec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// ALiBi over heads that are no power of two, LayerNorm without biases, one for attention and MLP,
// one after the embedding, a window.
proto::DecoderSpec TinyAlibiSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Experts in every layer, two of eight, whose weights sum to one.
proto::DecoderSpec TinyMixtralSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// A dense layer first, then experts: sigmoids with a bias, groups, a scale, and a shared expert.
proto::DecoderSpec TinyDeepseekSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// A shared expert with a gate, weights of 8 and 4 bits, each layer in its own way; norms around.
proto::DecoderSpec TinyQuantizedMoeSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Attention over latents, of queries, too, with quantised weights around them.
proto::DecoderSpec TinyLatentSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// Experts, LayerNorm without a bias, and limits of queries, keys and values that some reach.
proto::DecoderSpec TinyDbrxSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// Weights of 8 and 4 bits, with and without zero points and groups, each layer in its own way, some
// with int8 activations and some without; the tied embedding too.
proto::DecoderSpec TinyQuantizedSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// Quantised weights with their columns in other orders: of every product that may have that, with
// and without int8 activations, and an untied head.
proto::DecoderSpec TinyReorderedSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// The same without a gate, with biases, of attention and MLP beside each other over one norm.
proto::DecoderSpec TinyReorderedParallelSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);
// The same of latent attention.
proto::DecoderSpec TinyReorderedLatentSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32);

// All of the above.
std::vector<proto::DecoderSpec> TinySpecs(proto::ComputeType compute);

// The values that MakeRandomModel writes into one required tensor, row-major, rounded to its dtype;
// of a quantised one, before it is quantised.
std::vector<float> RandomTensor(const RequiredTensor& tensor, uint64_t seed);

inline constexpr int64_t kNoLayer = std::numeric_limits<int64_t>::max();

// How a spec quantises `tensor`, or null.
const proto::WeightQuant* QuantOf(const proto::DecoderSpec& spec, const std::string& tensor);

// The weight that the stored integers, scales and zero points of `tensor` stand for, row-major.
std::vector<float> StoredWeight(const ModelReader& reader, const RequiredTensor& tensor);

// Throws std::runtime_error with the writer's message when the spec is refused. Layers from
// silent_from on add nothing to the residual stream: the model is then that of as many layers.
std::shared_ptr<const ModelImage> MakeRandomModel(const proto::DecoderSpec& spec, uint64_t seed,
                                                  int64_t silent_from = kNoLayer);

// The same, opened.
std::unique_ptr<ModelReader> OpenRandomModel(const proto::DecoderSpec& spec, uint64_t seed);

}  // namespace allspark::testing
