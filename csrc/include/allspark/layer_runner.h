// Runs the layers of a model over many sequences at once, and measures what each weight is
// multiplied with: what tools that quantise weights need. The model is usually one layer of a
// larger one (its spec has one layer), so that one layer's weights are in memory. One thread at a
// time per runner.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "allspark/engine.h"
#include "allspark/status.h"

namespace [[gnu::visibility("default")]] allspark {

struct LayerRunnerOptions {
  int64_t num_threads = 0;  // 0: one for each core that this process may use
  std::string isa = {};     // "": the processor's best kernel table
  int64_t length = 0;       // tokens of each sequence
};

// The inputs of one weight, over all tokens that it saw; one expert's, where a weight has several.
// The sums do not depend on the number of threads.
struct InputStatistics {
  int64_t num_features = 0;
  int64_t num_tokens = 0;       // 0: nothing was seen, and the vectors are empty
  std::vector<double> sum_abs;  // [num_features], of magnitudes
  std::vector<float> max_abs;   // [num_features]
  std::vector<float> products;  // [num_features, num_features]: X^T X; empty: not asked for
};

class LayerRunner {
 public:
  // InvalidArgument names the option, the value and the bound; other errors as of an install.
  static Result<std::unique_ptr<LayerRunner>> Create(std::shared_ptr<const ModelImage> image,
                                                     const LayerRunnerOptions& options);
  virtual ~LayerRunner() = default;

  virtual int64_t hidden_size() const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual int64_t length() const = 0;
  // From now on runs add to the statistics of these weights ("layers.0.qkv"), which must not be
  // quantised, nor k_up or v_up of latent attention. Without `products` these are cheap. NotFound
  // names a weight that the model does not have.
  virtual Status Observe(const std::vector<std::string>& tensors, bool products = true) = 0;
  // Runs all layers. The residual stream [num_sequences * length, hidden_size] begins as `in`, or
  // where that is null as the embeddings of `ids` [num_sequences * length]; `out`, which may be
  // `in`, gets what it is at the end, unless it is null; and `logits` [num_sequences * length,
  // vocab_size] what the head makes of it, unless that is null. DataLoss names the weight and the
  // token whose input has a number that is not finite. After any error but InvalidArgument, which
  // names an id, all statistics begin anew.
  virtual Status Run(const int32_t* ids, const float* in, int64_t num_sequences, float* out,
                     float* logits = nullptr) = 0;
  // The sums so far, which begin anew. NotFound where the weight is not observed, or has no such
  // expert.
  virtual Result<InputStatistics> TakeStatistics(std::string_view tensor, int64_t expert) = 0;
};

}  // namespace allspark
