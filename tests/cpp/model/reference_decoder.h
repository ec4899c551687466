// A second implementation of the decoder, in double and without a cache: the oracle of the decoder
// tests. Shares no code with the engine's. Each value has the variance of the rounding error that a
// correct implementation may have accumulated, to first order and as if roundings were independent
// (Higham and Mary 2019 argue for this model). The tests' bounds come from these variances.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/random_model.h"
#include "weights/lora_file.h"

namespace allspark::testing {

struct Num {
  double v = 0;
  double e = 0;  // variance of the error
};
using Row = std::vector<Num>;
using Rows = std::vector<Row>;

class ReferenceDecoder {
 public:
  ReferenceDecoder(const proto::DecoderSpec& spec, uint64_t seed,
                   CacheMode cache_mode = CacheMode::kDefault)
      : spec_(spec), cache_mode_(cache_mode) {
    const auto reader = OpenRandomModel(spec, seed);
    auto tensors = RequiredTensors(spec);
    for (const RequiredTensor& tensor : *tensors) {
      weights_[tensor.name] = QuantOf(spec, tensor.name) != nullptr ? StoredWeight(*reader, tensor)
                                                                    : RandomTensor(tensor, seed);
    }
    for (const proto::WeightQuant& quant : spec.weight_quant()) {
      if (quant.reordered()) PutInPlace(quant.tensor());
    }
    compute_unit_ = spec.compute_type() == proto::COMPUTE_BFLOAT16 ? 0x1p-8 : kFloatUnit;
  }

  // Sets an adapter, which must outlive this object. Its values are those that the engine keeps.
  void SetLora(const LoraFile* lora) { lora_ = lora; }

  // Logits of every token, [tokens][vocab].
  Rows Logits(const std::vector<int32_t>& tokens) const {
    const int64_t hidden = spec_.hidden_size();
    Rows x;
    for (const int32_t token : tokens) {
      Row row(static_cast<size_t>(hidden));
      for (int64_t i = 0; i < hidden; ++i) {
        row[static_cast<size_t>(i)].v =
            weights_.at("embedding")[static_cast<size_t>(token * hidden + i)];
      }
      AddLora("embedding", Row(1, Num{static_cast<double>(token), 0}), /*quantized=*/false, row);
      if (spec_.embedding_scale() != 0) Scale(spec_.embedding_scale(), row);
      if (spec_.learned_positions()) {
        for (int64_t i = 0; i < hidden; ++i) {
          const auto at = static_cast<size_t>(static_cast<int64_t>(x.size()) * hidden + i);
          Num& n = row[static_cast<size_t>(i)];
          n.v += static_cast<double>(weights_.at("position_embedding")[at]);
          n = Rounded(n, kFloatUnit);
        }
      }
      if (spec_.embedding_norm()) row = Norm(row, "embedding_norm", kFloatUnit);
      x.push_back(row);
    }
    for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
      const std::string prefix = "layers." + std::to_string(layer) + ".";
      const Rows before = x;
      Attention(prefix, spec_.layer_window_size() > 0 ? spec_.layer_window(int(layer)) : 0, x);
      if (weights_.count(prefix + "router") > 0) {
        Experts(prefix, x);
      } else {
        Mlp(prefix, spec_.parallel_residual() ? before : x, x);
      }
    }
    Rows logits;
    for (const Row& row : x) {
      const Row normed = Norm(row, "final_norm", compute_unit_);
      logits.push_back(Gemm(spec_.tie_embeddings() ? "embedding" : "lm_head",
                            spec_.lm_head_bias() ? "lm_head_bias" : "", normed,
                            /*module=*/"lm_head"));
      CapLogits(logits.back());
    }
    return logits;
  }

 private:
  static constexpr double kFloatUnit = 0x1p-24;

  static double Square(double x) { return x * x; }

  // Undoes the reordering of the columns of `name`. For "down", also undoes it for the rows of the
  // weight whose results "down" reads.
  void PutInPlace(const std::string& name) {
    const std::vector<float>& order = weights_.at(name + "_order");
    const size_t cols = order.size();
    const auto put = [&](std::vector<float>& stored, size_t width, bool columns) {
      std::vector<float> in_place(stored.size());
      for (size_t i = 0; i < stored.size(); ++i) {
        const size_t row = i / width, col = i % width;
        const size_t to_row =
            columns ? row : row / cols * cols + static_cast<size_t>(order[row % cols]);
        const size_t to_col = columns ? static_cast<size_t>(order[col]) : col;
        in_place[to_row * width + to_col] = stored[i];
      }
      stored = in_place;
    };
    put(weights_.at(name), cols, /*columns=*/true);
    if (!name.ends_with(".down")) return;
    const std::string up =
        name.substr(0, name.size() - 4) + (spec_.ungated_mlp() ? "up" : "gate_up");
    put(weights_.at(up), static_cast<size_t>(spec_.hidden_size()), /*columns=*/false);
    if (spec_.mlp_bias()) put(weights_.at(up + "_bias"), 1, /*columns=*/false);
  }
  // The value after a rounding of relative size `unit`.
  static Num Rounded(Num x, double unit) { return {x.v, x.e + Square(unit * x.v)}; }

  static void Scale(float scale, Row& row) {
    const double factor = static_cast<double>(scale);
    for (Num& n : row) n = Rounded({n.v * factor, n.e * factor * factor}, kFloatUnit);
  }

  void CapLogits(Row& logits) const {
    if (spec_.logits_scale() != 0) Scale(spec_.logits_scale(), logits);
    const double cap = static_cast<double>(spec_.logits_soft_cap());
    if (cap == 0) return;
    for (Num& n : logits) {
      const double t = std::tanh(n.v / cap);
      n = {cap * t, n.e * Square(1 - t * t) + 16 * Square(kFloatUnit * cap * t)};
    }
  }

  // The input of attention or MLP from the residual stream.
  Row ReadResidual(const Row& x, const std::string& norm) const {
    if (spec_.norm_placement() != proto::NORM_AFTER) {
      return Norm(x, norm, compute_unit_);
    }
    Row y = x;
    for (Num& n : y) n = Rounded(n, compute_unit_);
    return y;
  }

  void AddToResidual(Row branch, const std::string& post_norm, Row& x) const {
    if (spec_.norm_placement() != proto::NORM_BEFORE) {
      branch = Norm(branch, post_norm, kFloatUnit);
    }
    if (spec_.residual_scale() != 0) Scale(spec_.residual_scale(), branch);
    Add(branch, x);
  }

  // The norm of a row of the residual stream.
  Row Norm(const Row& x, const std::string& name, double unit) const {
    if (spec_.norm_kind() == proto::RMS_NORM) return RmsNorm(x, weights_.at(name), unit);
    double mean = 0, mean_error = 0, size = 0;
    for (const Num& n : x) {
      mean += n.v;
      mean_error += n.e;
      size += std::abs(n.v);
    }
    const double count = static_cast<double>(x.size());
    mean /= count;
    Row centered = x;
    for (Num& n : centered) {
      // The roundings of the mean's sum and of the difference.
      const double rounding = Square(kFloatUnit * size / count) * (count / 4 + 4);
      n = Rounded({n.v - mean, n.e + mean_error / Square(count) + rounding}, kFloatUnit);
    }
    Row y = RmsNorm(centered, weights_.at(name), kFloatUnit);
    for (size_t i = 0; i < y.size(); ++i) {
      if (spec_.norm_bias()) y[i].v += static_cast<double>(weights_.at(name + "_bias")[i]);
      y[i] = Rounded(Rounded(y[i], kFloatUnit), unit);
    }
    return y;
  }

  Row RmsNorm(const Row& x, const std::vector<float>& weight, double unit) const {
    return RmsNorm(x, weight, unit, static_cast<double>(spec_.norm_eps()));
  }
  static Row RmsNorm(const Row& x, const std::vector<float>& weight, double unit, double eps) {
    double squares = 0, spread = 0;
    for (const Num& n : x) {
      squares += n.v * n.v;
      spread += n.v * n.v * n.e;
    }
    const double count = static_cast<double>(x.size());
    const double r = 1.0 / std::sqrt(squares / count + eps);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double w = static_cast<double>(weight[i]);
      y[i].v = x[i].v * r * w;
      // d y_i = w r d x_i - w x_i r^3 mean(x d x); the sum of squares and the root round too.
      y[i].e = Square(w * r) * x[i].e + Square(w * x[i].v * r * r * r / count) * spread +
               Square(kFloatUnit * y[i].v) * (count / 4 + 4);
      y[i] = Rounded(y[i], unit);
    }
    return y;
  }

  // Rows of an adapter's matrix as the engine keeps them: rounded to the compute type, or where the
  // weight reads int8 in 8 bits, with a scale for every `group` elements.
  const std::vector<double>& Kept(const float* values, int64_t rows, int64_t cols, bool quantized,
                                  int64_t group) const {
    std::vector<double>& kept = kept_[values];
    if (!kept.empty()) return kept;
    const auto count = static_cast<size_t>(rows * cols);
    for (size_t i = 0; i < count; ++i) {
      kept.push_back(static_cast<double>(
          compute_unit_ == kFloatUnit ? values[i] : ToFloat(ToBFloat16(values[i]))));
    }
    for (size_t begin = 0; quantized && begin < count; begin += static_cast<size_t>(cols)) {
      for (int64_t at = 0; at < cols; at += group) {
        KeepBytes(values + begin + at, std::min(group, cols - at),
                  &kept[begin + static_cast<size_t>(at)]);
      }
    }
    return kept;
  }
  // The values in 8 bits: times the lowest bfloat16 with which none is beyond 127.
  static void KeepBytes(const float* values, int64_t count, double* kept) {
    double highest = 0;
    for (int64_t i = 0; i < count; ++i) {
      highest = std::max(highest, std::abs(static_cast<double>(values[i])));
    }
    BFloat16 scale = ToBFloat16(static_cast<float>(highest / 127));
    if (static_cast<double>(ToFloat(scale)) < highest / 127) ++scale.bits;
    for (int64_t i = 0; i < count; ++i) {
      const float steps = std::nearbyint(values[i] / ToFloat(scale));
      kept[i] = static_cast<double>(steps) * static_cast<double>(ToFloat(scale));
    }
  }

  // y += b (a x) for the adapter's modules of `name`; for the embedding, x is the token's id.
  // quantized: x is int8.
  void AddLora(const std::string& name, const Row& x, bool quantized, Row& y) const {
    if (lora_ == nullptr) return;
    constexpr int64_t kGroup = 16;  // of the rank, to a scale
    for (const LoraPair& pair : lora_->pairs()) {
      if (pair.tensor != name) continue;
      const auto rank = static_cast<size_t>(pair.rank);
      const std::vector<double>& a = Kept(pair.a, pair.rank, pair.cols, quantized, pair.cols);
      const std::vector<double>& b = Kept(pair.b, pair.rows, pair.rank, quantized, kGroup);
      Row low(rank);
      for (size_t r = 0; r < rank; ++r) {
        if (name == "embedding") {
          low[r].v = a[static_cast<size_t>(x[0].v) * rank + r];
          continue;
        }
        for (size_t k = 0; k < x.size(); ++k) AddProduct(a[r * x.size() + k], x[k], low[r]);
        low[r] = Rounded(low[r], quantized ? kFloatUnit : compute_unit_);
      }
      if (quantized) {
        low.resize((rank + kGroup - 1) / kGroup * kGroup);
        QuantizeRow(low, kGroup);
      }
      for (size_t row = 0; row < static_cast<size_t>(pair.rows); ++row) {
        Num sum;
        for (size_t r = 0; r < rank; ++r) AddProduct(b[row * rank + r], low[r], sum);
        Num& out = y[static_cast<size_t>(pair.row_begin) + row];
        out = Rounded({out.v + sum.v, out.e + sum.e}, kFloatUnit);
      }
    }
  }

  // One step of a sum of products in float32.
  static void AddProduct(double weight, const Num& x, Num& sum) {
    sum.v += weight * x.v;
    const double rounding = Square(sum.v) + Square(weight * x.v);
    sum.e += Square(weight) * x.e + Square(kFloatUnit) * rounding;
  }

  // out = x w^T (+ bias), accumulated in float32 in ascending order. `module`: the adapters' name
  // of the weight; empty: `name`.
  // `expert`: index among `experts` weights that are stored one after the other.
  Row Gemm(const std::string& name, const std::string& bias, Row x, const std::string& module = "",
           int64_t expert = 0, int64_t experts = 1) const {
    const proto::WeightQuant* quant = QuantOf(spec_, name);
    const bool quantized = quant != nullptr && quant->quantize_activations();
    if (quantized) {
      QuantizeRow(x, static_cast<size_t>(quant->activation_group_size()));
    }
    const std::vector<float>& w = weights_.at(name);
    const size_t k_total = x.size();
    Row y(w.size() / k_total / static_cast<size_t>(experts));
    const size_t first = static_cast<size_t>(expert) * y.size();
    for (size_t n = 0; n < y.size(); ++n) {
      Num sum;
      for (size_t k = 0; k < k_total; ++k) {
        AddProduct(static_cast<double>(w[(first + n) * k_total + k]), x[k], sum);
      }
      if (!bias.empty()) {
        sum.v += static_cast<double>(weights_.at(bias)[n]);
        sum = Rounded(sum, kFloatUnit);
      }
      y[n] = sum;
    }
    AddLora(module.empty() ? name : module, x, quantized, y);
    return y;
  }

  // The row as int8: half a step of error each.
  // `group`: elements per scale; 0: all.
  static void QuantizeRow(Row& x, size_t group) {
    if (group == 0) group = x.size();
    for (size_t begin = 0; begin < x.size(); begin += group) {
      double highest = 0;
      for (size_t i = begin; i < begin + group; ++i) highest = std::max(highest, std::abs(x[i].v));
      for (size_t i = begin; i < begin + group; ++i) x[i].e += Square(0.5 * highest / 127);
    }
  }

  void RotateHead(Num* head, int64_t position, const std::vector<float>& inv_freq) const {
    const int64_t pairs = spec_.rotary_dim() / 2;
    const double scaling = spec_.rope_attention_scaling() == 0.0f
                               ? 1.0
                               : static_cast<double>(spec_.rope_attention_scaling());
    for (int64_t i = 0; i < pairs; ++i) {
      // The angle is a float32 product by definition.
      const float angle = static_cast<float>(position) * inv_freq[static_cast<size_t>(i)];
      const double c = std::cos(static_cast<double>(angle)) * scaling;
      const double s = std::sin(static_cast<double>(angle)) * scaling;
      Num& first = head[spec_.rope_interleaved() ? 2 * i : i];
      Num& second = head[spec_.rope_interleaved() ? 2 * i + 1 : i + pairs];
      const Num a = first, b = second;
      const double noise = 4 * Square(kFloatUnit) * (Square(a.v) + Square(b.v)) * Square(scaling);
      first = {a.v * c - b.v * s, a.e * c * c + b.e * s * s + noise};
      second = {b.v * c + a.v * s, b.e * c * c + a.e * s * s + noise};
    }
  }

  // Elements of a key in the cache.
  int64_t KeyDim() const {
    return spec_.kv_latent() > 0 ? spec_.kv_latent() + spec_.rotary_dim() : spec_.head_dim();
  }

  // One query head of one token over keys [begin, end).
  Row Attend(const Num* q, const Rows& k, const Rows& v, int64_t q_head, int64_t begin,
             int64_t end) const {
    const int64_t kv_head = q_head / (spec_.num_heads() / spec_.num_kv_heads());
    const int64_t dim = KeyDim();
    const double scale = spec_.attention_scale() == 0.0f
                             ? 1.0 / std::sqrt(static_cast<double>(spec_.head_dim()))
                             : static_cast<double>(spec_.attention_scale());
    const double cap = static_cast<double>(spec_.attention_soft_cap());
    std::vector<Num> scores;
    double highest = -1e300;
    for (int64_t p = begin; p < end; ++p) {
      const Num* key = k[static_cast<size_t>(p)].data() + kv_head * dim;
      Num s;
      for (int64_t d = 0; d < dim; ++d) {
        // A kernel may round queries to the cache's type before the dot product.
        const Num a = Rounded(q[d], compute_unit_);
        s.v += a.v * key[d].v;
        s.e += Square(a.v) * key[d].e + Square(key[d].v) * a.e + Square(kFloatUnit * s.v);
      }
      s = {s.v * scale, s.e * scale * scale + Square(kFloatUnit * s.v * scale)};
      if (cap > 0) {
        const double t = std::tanh(s.v / cap);
        s = {cap * t, s.e * Square(1 - t * t) + 16 * Square(kFloatUnit * cap)};
      }
      if (spec_.alibi()) {
        const float slope = weights_.at("alibi.slopes")[static_cast<size_t>(q_head)];
        const double bias = static_cast<double>(slope) * static_cast<double>(p + 1 - end);
        s = Rounded({s.v + bias, s.e + Square(kFloatUnit * bias)}, kFloatUnit);
      }
      highest = std::max(highest, s.v);
      scores.push_back(s);
    }
    double denominator = 0;
    for (Num& s : scores) {
      // The weight, with the error of its logarithm: the exponent's and the exponential's own.
      const double rounding = 16 * Square(kFloatUnit) * (1 + Square(s.v) + Square(highest));
      s = {std::exp(s.v - highest), s.e + Square(compute_unit_) + rounding};
      denominator += s.v;
    }
    Row out(static_cast<size_t>(dim));
    for (int64_t d = 0; d < dim; ++d) {
      Num& o = out[static_cast<size_t>(d)];
      double magnitude = 0;
      for (int64_t p = begin; p < end; ++p) {
        const Num& value = v[static_cast<size_t>(p)][static_cast<size_t>(kv_head * dim + d)];
        const double weight = scores[static_cast<size_t>(p - begin)].v / denominator;
        o.v += weight * value.v;
        o.e += Square(weight) * value.e;
        magnitude += weight * std::abs(value.v);
      }
      for (int64_t p = begin; p < end; ++p) {
        const Num& value = v[static_cast<size_t>(p)][static_cast<size_t>(kv_head * dim + d)];
        const Num& s = scores[static_cast<size_t>(p - begin)];
        o.e += Square(s.v / denominator * (value.v - o.v)) * s.e;
      }
      o.e += Square(kFloatUnit * magnitude) * static_cast<double>(end - begin + 8);
      o = Rounded(o, compute_unit_);
    }
    return out;
  }

  void NormInPlace(Num* x, int64_t size, const std::string& weight) const {
    const Row normed = RmsNorm(Row(x, x + size), weights_.at(weight), kFloatUnit);
    std::copy(normed.begin(), normed.end(), x);
  }

  void SplitHeads(const std::string& prefix, int64_t window, Row& qkv, int64_t position) const {
    const int64_t dim = spec_.head_dim();
    const int64_t heads = spec_.num_heads() + spec_.num_kv_heads();
    const int64_t q_cols = spec_.num_heads() * dim;
    if (spec_.qk_norm_whole()) {
      NormInPlace(qkv.data(), q_cols, prefix + "q_norm");
      NormInPlace(qkv.data() + q_cols, spec_.num_kv_heads() * dim, prefix + "k_norm");
    }
    const bool own = spec_.window_rope() && window > 0;
    const std::string inv_freq = own ? "rope.window_inv_freq" : "rope.inv_freq";
    for (int64_t h = 0; h < heads; ++h) {
      Num* head = qkv.data() + h * dim;
      if (spec_.qk_norm() && !spec_.qk_norm_whole()) {
        NormInPlace(head, dim, prefix + (h < spec_.num_heads() ? "q_norm" : "k_norm"));
      }
      if (spec_.rotary_dim() > 0) RotateHead(head, position, weights_.at(inv_freq));
    }
  }

  // A token's keys or values as the cache stores them: a quantised element errs by up to half a
  // step.
  void Cache(Row& row, bool keys) const {
    const bool of_4_bits =
        cache_mode_ == CacheMode::kQuantU4 || (cache_mode_ == CacheMode::kQuantK8V4 && !keys);
    const auto dim = static_cast<size_t>(KeyDim());
    for (size_t head = 0; head < row.size(); head += dim) {
      double low = 0, high = 0;
      for (size_t d = head; d < head + dim; ++d) {
        low = std::min(low, row[d].v);
        high = std::max(high, row[d].v);
      }
      // Both the element and the zero point of 4 bits are rounded.
      const double error = cache_mode_ == CacheMode::kDefault ? 0
                           : of_4_bits                        ? (high - low) / 15
                                                              : 0.5 * std::max(-low, high) / 127;
      for (size_t d = head; d < head + dim; ++d) {
        row[d] =
            error > 0 ? Num{row[d].v, row[d].e + Square(error)} : Rounded(row[d], compute_unit_);
      }
    }
  }

  // Queries or keys in the space in which keys of 4 bits are stored: times a Hadamard matrix of the
  // largest power of two that divides a head, over its root.
  void Spread(Row& row) const {
    if (cache_mode_ != CacheMode::kQuantU4) return;
    const auto dim = static_cast<size_t>(KeyDim()), size = dim & (~dim + 1);
    for (size_t begin = 0; begin < row.size(); begin += size) {
      const Row from(row.begin() + static_cast<int64_t>(begin),
                     row.begin() + static_cast<int64_t>(begin + size));
      for (size_t i = 0; i < size; ++i) {
        double sum = 0, squares = 0, errors = 0;
        for (size_t j = 0; j < size; ++j) {
          sum += std::popcount(i & j) % 2 == 0 ? from[j].v : -from[j].v;
          squares += Square(from[j].v);
          errors += from[j].e;
        }
        // Each of the stages rounds, and the factor does.
        const double noise = Square(kFloatUnit) * (std::bit_width(size) * squares + Square(sum));
        const auto n = static_cast<double>(size);
        row[begin + i] = {sum / std::sqrt(n), (errors + noise) / n};
      }
    }
  }

  // Latent attention: a token's queries in the space of the cache, and the row that is both its key
  // and value. Multiplies queries with k_up, as the engine does, since the errors depend on that
  // order. The model's definition multiplies keys with k_up; the tests against transformers check
  // that both agree.
  void SplitLatents(const std::string& prefix, const Row& stream, int64_t position, Row& q,
                    Row& key) const {
    const int64_t heads = spec_.num_heads(), dim = spec_.head_dim();
    const int64_t rotary = spec_.rotary_dim(), unrotated = dim - rotary;
    const std::vector<float>& inv_freq = weights_.at("rope.inv_freq");
    const Row normed = ReadResidual(stream, prefix + "attention_norm");
    Row latents = Gemm(prefix + "latents", "", normed);
    key.assign(latents.begin() + spec_.q_latent(), latents.end());
    const double eps = static_cast<double>(spec_.latent_norm_eps());
    Row kv_latent(key.begin(), key.begin() + spec_.kv_latent());
    kv_latent = RmsNorm(kv_latent, weights_.at(prefix + "kv_latent_norm"), kFloatUnit, eps);
    std::copy(kv_latent.begin(), kv_latent.end(), key.begin());
    RotateHead(key.data() + spec_.kv_latent(), position, inv_freq);
    Row from = normed;
    if (spec_.q_latent() > 0) {
      latents.resize(static_cast<size_t>(spec_.q_latent()));
      from = RmsNorm(latents, weights_.at(prefix + "q_latent_norm"), compute_unit_, eps);
    }
    Row queries = Gemm(prefix + "q", "", from);
    for (int64_t h = 0; h < heads; ++h) {
      Num* head = queries.data() + h * dim;
      RotateHead(head + unrotated, position, inv_freq);
      Row plain(head, head + unrotated);
      for (Num& n : plain) n = Rounded(n, compute_unit_);
      const Row absorbed = Gemm(prefix + "k_up", "", plain, "", h, heads);
      q.insert(q.end(), absorbed.begin(), absorbed.end());
      q.insert(q.end(), head + unrotated, head + dim);
    }
  }

  // The value of a head of latent attention, which the output projection reads.
  Row LatentValue(const std::string& prefix, int64_t head, Row attended) const {
    attended.resize(static_cast<size_t>(spec_.kv_latent()));
    Row value = Gemm(prefix + "v_up", "", attended, "", head, spec_.num_heads());
    for (Num& n : value) n = Rounded(n, compute_unit_);
    return value;
  }

  // A token's keys and values as the cache stores them, and its queries as they meet them.
  void Store(Row& q, Row& k, Row& v) const {
    Spread(q);
    Spread(k);
    Cache(k, /*keys=*/true);
    Cache(v, /*keys=*/false);
  }

  void Attention(const std::string& prefix, int64_t window, Rows& x) const {
    const int64_t dim = KeyDim();
    const int64_t q_cols = spec_.num_heads() * dim;
    const int64_t kv_cols = spec_.num_kv_heads() * dim;
    Rows q, k, v;
    for (size_t t = 0; t < x.size(); ++t) {
      if (spec_.kv_latent() > 0) {
        q.emplace_back(), k.emplace_back();
        SplitLatents(prefix, x[t], static_cast<int64_t>(t), q.back(), k.back());
        v.push_back(k.back());
        Store(q.back(), k.back(), v.back());
        continue;
      }
      Row qkv = Gemm(prefix + "qkv", spec_.qkv_bias() ? prefix + "qkv_bias" : "",
                     ReadResidual(x[t], prefix + "attention_norm"));
      const double limit = static_cast<double>(spec_.qkv_limit());
      for (Num& n : qkv) {
        if (limit > 0) n.v = std::clamp(n.v, -limit, limit);
      }
      SplitHeads(prefix, window, qkv, static_cast<int64_t>(t));
      q.emplace_back(qkv.begin(), qkv.begin() + q_cols);
      k.emplace_back(qkv.begin() + q_cols, qkv.begin() + q_cols + kv_cols);
      v.emplace_back(qkv.begin() + q_cols + kv_cols, qkv.end());
      Store(q.back(), k.back(), v.back());
    }
    for (size_t t = 0; t < x.size(); ++t) {
      const int64_t end = static_cast<int64_t>(t) + 1;
      const int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : 0;
      Row attended;
      for (int64_t h = 0; h < spec_.num_heads(); ++h) {
        Row head = Attend(q[t].data() + h * dim, k, v, h, begin, end);
        if (spec_.kv_latent() > 0) head = LatentValue(prefix, h, head);
        attended.insert(attended.end(), head.begin(), head.end());
      }
      AddToResidual(Gemm(prefix + "o", spec_.o_bias() ? prefix + "o_bias" : "", attended),
                    prefix + "attention_post_norm", x[t]);
    }
  }

  double Activate(double x) const {
    switch (spec_.activation()) {
      case proto::GELU_TANH:
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case proto::GELU_ERF:
        return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      case proto::RELU:
        return std::max(0.0, x);
      default:
        return x / (1 + std::exp(-x));
    }
  }

  Row Gated(const Row& gate_up, bool has_gate = true) const {
    const size_t inner = has_gate ? gate_up.size() / 2 : gate_up.size();
    Row gated(inner);
    for (size_t i = 0; i < inner; ++i) {
      const Num gate = gate_up[i], up = has_gate ? gate_up[inner + i] : Num{1, 0};
      const double act = Activate(gate.v);
      const double slope = (Activate(gate.v + 1e-5) - Activate(gate.v - 1e-5)) / 2e-5;
      // The activations' exponentials and polynomials: a few units of the input's size.
      const double act_error = 16 * Square(kFloatUnit * gate.v);
      gated[i] = {act * up.v,
                  Square(slope * up.v) * gate.e + Square(act) * up.e + Square(up.v) * act_error};
      gated[i] = Rounded(gated[i], compute_unit_);
    }
    return gated;
  }

  // Reads the rows of `from` and adds to the rows of `x`.
  void Mlp(const std::string& prefix, const Rows& from, Rows& x) const {
    const std::string name = prefix + (spec_.ungated_mlp() ? "up" : "gate_up");
    const std::string norm = prefix + (spec_.shared_norm() ? "attention_norm" : "mlp_norm");
    for (size_t t = 0; t < x.size(); ++t) {
      const Row gated =
          Gated(Gemm(name, spec_.mlp_bias() ? name + "_bias" : "", ReadResidual(from[t], norm)),
                !spec_.ungated_mlp());
      AddToResidual(Gemm(prefix + "down", spec_.mlp_bias() ? prefix + "down_bias" : "", gated),
                    prefix + "mlp_post_norm", x[t]);
    }
  }

  static Num Sigmoid(Num x) {
    const double s = 1 / (1 + std::exp(-x.v));
    return {s, Square(s * (1 - s)) * x.e + 16 * Square(kFloatUnit * s) * (1 + Square(x.v))};
  }

  // A router's scores. The scores of one token are correlated: an error of one logit changes every
  // softmax value. The weights' sum takes that into account only to first order.
  Row Scores(const Row& logits) const {
    const auto experts = static_cast<size_t>(spec_.num_experts());
    Row scores(experts);
    double highest = logits[0].v, sum = 0;
    for (size_t i = 0; i < experts; ++i) highest = std::max(highest, logits[i].v);
    for (size_t i = 0; i < experts; ++i) sum += std::exp(logits[i].v - highest);
    for (size_t i = 0; i < experts; ++i) {
      if (spec_.router_score() == proto::ROUTER_SIGMOID) {
        scores[i] = Sigmoid(logits[i]);
        continue;
      }
      const double s = std::exp(logits[i].v - highest) / sum;
      double relative = 0;
      for (size_t j = 0; j < experts; ++j) {
        const double share = std::exp(logits[j].v - highest) / sum;
        relative += Square((i == j ? 1 : 0) - share) * logits[j].e;
      }
      const double rounding = 32 * Square(kFloatUnit) * (1 + Square(logits[i].v) + Square(highest));
      scores[i] = {s, s * s * (relative + rounding)};
    }
    return scores;
  }

  // The experts of the used groups; `choice` has the values by which experts are ranked.
  std::vector<size_t> Candidates(const Row& choice) const {
    const auto experts = choice.size();
    const auto groups = static_cast<size_t>(std::max<int64_t>(spec_.expert_groups(), 1));
    const size_t size = experts / groups;
    std::vector<std::pair<double, size_t>> best;
    for (size_t g = 0; g < groups; ++g) {
      std::vector<double> values;
      for (size_t i = g * size; i < (g + 1) * size; ++i) values.push_back(-choice[i].v);
      std::sort(values.begin(), values.end());
      const bool two = spec_.router_score() == proto::ROUTER_SIGMOID && size > 1;
      best.emplace_back(two ? values[0] + values[1] : values[0], g);
    }
    std::sort(best.begin(), best.end());
    best.resize(static_cast<size_t>(std::max<int64_t>(spec_.used_expert_groups(), 1)));
    std::vector<size_t> candidates;
    for (const auto& [quality, g] : best) {
      for (size_t i = g * size; i < (g + 1) * size; ++i) candidates.push_back(i);
    }
    return candidates;
  }

  Row ExpertMlp(const std::string& gate_up, const std::string& down, const Row& x,
                int64_t expert = 0, int64_t experts = 1) const {
    return Gemm(down, "", Gated(Gemm(gate_up, "", x, "", expert, experts)), "", expert, experts);
  }

  void Experts(const std::string& prefix, Rows& x) const {
    const int64_t experts = spec_.num_experts();
    const auto top_k = static_cast<size_t>(spec_.experts_per_token());
    for (Row& row : x) {
      const Row normed = ReadResidual(row, prefix + "mlp_norm");
      const Row logits = Gemm(prefix + "router", "", normed);
      const Row scores = Scores(logits);
      const bool by_logits = spec_.router_score() == proto::ROUTER_SOFTMAX && !spec_.router_bias();
      Row choice = by_logits ? Row(logits.begin(), logits.begin() + experts) : scores;
      if (spec_.router_bias()) {
        const std::vector<float>& bias = weights_.at(prefix + "router_bias");
        for (size_t i = 0; i < choice.size(); ++i) {
          choice[i] =
              Rounded({choice[i].v + static_cast<double>(bias[i]), choice[i].e}, kFloatUnit);
        }
      }
      std::vector<size_t> order = Candidates(choice);
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return choice[a].v > choice[b].v; });
      double sum = 0, sum_error = 0;
      for (size_t j = 0; j < top_k; ++j) sum += scores[order[j]].v, sum_error += scores[order[j]].e;
      Row branch(row.size());
      const auto weight_of = [&](size_t expert) {
        Num weight = scores[expert];
        if (spec_.normalize_expert_weights()) {
          weight.e = weight.e / Square(sum) + Square(weight.v / Square(sum)) * sum_error;
          weight.v /= sum;
        }
        const double scale = spec_.expert_weight_scale() == 0
                                 ? 1.0
                                 : static_cast<double>(spec_.expert_weight_scale());
        return Rounded({weight.v * scale, weight.e * scale * scale}, 2 * kFloatUnit);
      };
      const auto add = [&](Num weight, const Row& y) {
        for (size_t i = 0; i < y.size(); ++i) {
          branch[i].v += weight.v * y[i].v;
          branch[i].e += Square(weight.v) * y[i].e + Square(y[i].v) * weight.e +
                         Square(kFloatUnit) * (Square(branch[i].v) + Square(weight.v * y[i].v));
        }
      };
      const auto mlp = [&](size_t expert) {
        return ExpertMlp(prefix + "experts_gate_up", prefix + "experts_down", normed,
                         static_cast<int64_t>(expert), experts);
      };
      for (size_t j = 0; j < top_k; ++j) add(weight_of(order[j]), mlp(order[j]));
      AddDoubt(choice, order, top_k, mlp, weight_of, branch);
      if (spec_.shared_intermediate_size() > 0) {
        const Num gate =
            spec_.shared_gate() ? Sigmoid(logits[static_cast<size_t>(experts)]) : Num{1, 0};
        add(gate, ExpertMlp(prefix + "shared_gate_up", prefix + "shared_down", normed));
      }
      AddToResidual(branch, prefix + "mlp_post_norm", row);
    }
  }

  // Where rounding may have chosen another expert or another group, the error is as large as the
  // change that this causes.
  template <class MlpOf, class WeightOf>
  void AddDoubt(const Row& choice, const std::vector<size_t>& order, size_t top_k, const MlpOf& mlp,
                const WeightOf& weight_of, Row& branch) const {
    constexpr double kSure = 8;  // deviations
    const size_t last = order[top_k - 1];
    for (size_t i = 0; i < choice.size(); ++i) {
      const auto taken = order.begin() + static_cast<std::ptrdiff_t>(top_k);
      if (std::find(order.begin(), taken, i) != taken) continue;
      const bool other_group = std::find(taken, order.end(), i) == order.end();
      const double gap = choice[last].v - choice[i].v;
      const double sigma = std::sqrt(choice[last].e + choice[i].e);
      if (gap > kSure * sigma && !other_group) continue;
      if (other_group && SureOfGroups(choice, order, kSure)) continue;
      const Row ours = mlp(last), theirs = mlp(i);
      const double weight = weight_of(last).v;
      for (size_t c = 0; c < branch.size(); ++c) {
        branch[c].e += Square(weight * (std::abs(ours[c].v) + std::abs(theirs[c].v)));
      }
    }
  }

  // Whether no rounding can change which groups are the best.
  bool SureOfGroups(const Row& choice, const std::vector<size_t>& order, double deviations) const {
    const size_t size = choice.size() / static_cast<size_t>(spec_.expert_groups());
    double worst = 1e300, best = -1e300, error = 0;
    for (size_t g = 0; g < choice.size() / size; ++g) {
      std::vector<double> values;
      double spread = 0;
      for (size_t i = g * size; i < (g + 1) * size; ++i) {
        values.push_back(-choice[i].v);
        spread = std::max(spread, choice[i].e);
      }
      std::sort(values.begin(), values.end());
      const bool two = spec_.router_score() == proto::ROUTER_SIGMOID && size > 1;
      const double quality = two ? -values[0] - values[1] : -values[0];
      error = std::max(error, 2 * spread);
      if (std::find(order.begin(), order.end(), g * size) != order.end()) {
        worst = std::min(worst, quality);
      } else {
        best = std::max(best, quality);
      }
    }
    return worst - best > deviations * std::sqrt(2 * error);
  }

  static void Add(const Row& branch, Row& x) {
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = Rounded({x[i].v + branch[i].v, x[i].e + branch[i].e}, kFloatUnit);
    }
  }

  proto::DecoderSpec spec_;
  CacheMode cache_mode_;
  std::map<std::string, std::vector<float>> weights_;
  double compute_unit_ = 0;
  const LoraFile* lora_ = nullptr;
  mutable std::map<const float*, std::vector<double>> kept_;  // of its matrices
};

}  // namespace allspark::testing
