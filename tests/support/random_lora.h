// Random adapters for the tiny models of random_model.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <list>
#include <random>
#include <string>
#include <vector>

#include "allspark/model_serializer.h"
#include "proto/allspark.pb.h"
#include "support/must.h"
#include "weights/lora_file.h"

namespace allspark::testing {

// An adapter in the test's memory.
class RandomLora final : public LoraFile {
 public:
  explicit RandomLora(uint64_t seed) : random_(seed) {}

  // a * x keeps the standard deviation of x; b * (a * x) halves it.
  RandomLora& Add(const std::string& tensor, int64_t row_begin, int64_t rows, int64_t cols,
                  int64_t rank) {
    const bool is_embedding = tensor == "embedding";
    LoraPair pair;
    pair.tensor = tensor;
    pair.row_begin = row_begin;
    pair.rows = rows;
    pair.cols = cols;
    pair.rank = rank;
    pair.a = Values(rank * cols, is_embedding ? 1.0 : 1.0 / std::sqrt(static_cast<double>(cols)));
    pair.b = Values(rows * rank, 0.5 / std::sqrt(static_cast<double>(rank)));
    pairs_.push_back(pair);
    return *this;
  }
  // Every module that takes adapters in every layer, with different ranks, and the embedding and
  // head.
  RandomLora& AddAll(const proto::DecoderSpec& spec, int64_t rank) {
    const int64_t hidden = spec.hidden_size();
    const int64_t q = spec.num_heads() * spec.head_dim();
    const int64_t kv = spec.num_kv_heads() * spec.head_dim();
    for (int64_t i = 0; i < spec.num_layers(); ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      if (spec.kv_latent() > 0) {
        const int64_t latent = spec.q_latent(), key = spec.kv_latent() + spec.rotary_dim();
        if (latent > 0) Add(layer + "latents", 0, latent, hidden, rank);
        Add(layer + "latents", latent, key, hidden, 3);
        Add(layer + "q", 0, q, latent > 0 ? latent : hidden, rank);
        Add(layer + "o", 0, hidden, spec.num_heads() * spec.value_dim(), rank);
      } else {
        Add(layer + "qkv", 0, q, hidden, rank);
        Add(layer + "qkv", q, kv, hidden, 1);
        Add(layer + "qkv", q + kv, kv, hidden, rank);
        Add(layer + "o", 0, hidden, q, rank);
      }
      const auto& dense = spec.dense_layers();
      const bool experts =
          spec.num_experts() > 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
      const std::string mlp = layer + (experts ? "shared_" : "");
      const int64_t inner = experts ? spec.shared_intermediate_size() : spec.intermediate_size();
      if (inner == 0) continue;
      if (spec.ungated_mlp()) {
        Add(mlp + "up", 0, inner, hidden, rank);
      } else {
        Add(mlp + "gate_up", 0, inner, hidden, 3);
        Add(mlp + "gate_up", inner, inner, hidden, rank);
      }
      Add(mlp + "down", 0, hidden, inner, rank);
    }
    Add("embedding", 0, hidden, spec.vocab_size(), rank);
    return Add("lm_head", 0, spec.vocab_size(), hidden, rank);
  }

  std::shared_ptr<const LoraImage> ToImage() const {
    const auto serializer = Must(LoraSerializer::Create("", ""));
    for (const LoraPair& pair : pairs_) {
      const auto size = [&](int64_t rows) { return static_cast<size_t>(rows * pair.rank); };
      Must(serializer->AddPair(pair.tensor, pair.row_begin, pair.rows, pair.cols, pair.rank,
                               {pair.a, size(pair.cols)}, {pair.b, size(pair.rows)}));
    }
    return Must(serializer->Finish());
  }

  std::span<const LoraPair> pairs() const override { return pairs_; }
  const std::string& source() const override { return source_; }

 private:
  const float* Values(int64_t count, double scale) {
    std::normal_distribution<double> normal(0.0, scale);
    std::vector<float>& values = values_.emplace_back(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(normal(random_));
    return values.data();
  }

  std::mt19937_64 random_;
  std::list<std::vector<float>> values_;
  std::vector<LoraPair> pairs_;
  std::string source_ = "random";
};

}  // namespace allspark::testing
