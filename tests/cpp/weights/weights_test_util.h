// Helpers of the tests of csrc/weights: small specs, values by formula, a plain packer to compare
// with, and images and files for tests to damage.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/must.h"
#include "support/temp_dir.h"
#include "tensor/tensor_view.h"
#include "weights/format.h"
#include "weights/model_reader.h"
#include "weights/model_writer.h"
#include "weights/required_tensors.h"

namespace allspark::testing {

inline constexpr StatusCode kDamaged = StatusCode::kDataLoss;  // of files and images

// Every optional tensor, and sizes that fill no panel: n of the GEMMs is 110, 18, 14, 18, 37.
inline proto::DecoderSpec OddSpec(proto::ComputeType compute) {
  proto::DecoderSpec spec;
  spec.set_architecture("OddForCausalLM");
  spec.set_vocab_size(37);
  spec.set_hidden_size(18);
  spec.set_num_layers(2);
  spec.set_num_heads(9);
  spec.set_num_kv_heads(1);
  spec.set_head_dim(10);
  spec.set_intermediate_size(70);
  spec.set_norm_eps(1e-6f);
  spec.set_qkv_bias(true);
  spec.set_o_bias(true);
  spec.set_mlp_bias(true);
  spec.set_qk_norm(true);
  spec.set_max_position(128);
  spec.set_rotary_dim(6);
  spec.add_layer_window(0);
  spec.add_layer_window(16);
  spec.set_compute_type(compute);
  return spec;
}

// The fewest tensors: one layer, tied, no rope.
inline proto::DecoderSpec SmallSpec(proto::ComputeType compute = proto::COMPUTE_FLOAT32) {
  proto::DecoderSpec spec;
  spec.set_architecture("SmallForCausalLM");
  spec.set_vocab_size(5);
  spec.set_hidden_size(4);
  spec.set_num_layers(1);
  spec.set_num_heads(2);
  spec.set_num_kv_heads(1);
  spec.set_head_dim(2);
  spec.set_intermediate_size(6);
  spec.set_norm_eps(1e-5f);
  spec.set_tie_embeddings(true);
  spec.set_max_position(16);
  spec.set_compute_type(compute);
  return spec;
}

// Every way to store a quantised weight, together with unquantised weights, in panels that are not
// full.
inline proto::DecoderSpec QuantSpec(proto::ComputeType compute = proto::COMPUTE_BFLOAT16) {
  proto::DecoderSpec spec = SmallSpec(compute);
  spec.set_architecture("QuantForCausalLM");
  spec.set_tie_embeddings(false);
  spec.set_vocab_size(37);
  spec.set_hidden_size(64);
  spec.set_num_layers(2);
  spec.set_num_heads(8);
  spec.set_head_dim(16);
  spec.set_intermediate_size(160);
  spec.set_qkv_bias(true);
  auto add = [&](const char* tensor, int bits, int64_t group, bool asymmetric, bool activations) {
    proto::WeightQuant* quant = spec.add_weight_quant();
    quant->set_tensor(tensor);
    quant->set_bits(bits);
    quant->set_group_size(group);
    quant->set_asymmetric(asymmetric);
    quant->set_quantize_activations(activations);
  };
  add("layers.0.qkv", 8, 0, false, true);
  add("layers.0.o", 8, 128, true, false);
  add("layers.0.gate_up", 4, 32, false, false);
  add("layers.0.down", 4, 0, true, true);
  add("layers.1.o", 4, 64, false, false);
  add("layers.1.down", 8, 32, false, false);
  add("lm_head", 4, 32, true, false);
  add("embedding", 8, 64, true, false);
  return spec;
}

inline int64_t Rows(const RequiredTensor& tensor) { return tensor.shape[0]; }
inline int64_t Cols(const RequiredTensor& tensor) {
  return tensor.shape.size() > 1 ? tensor.shape[1] : 1;
}

// A value that float16 and bfloat16 hold exactly, different for adjacent elements and never zero.
inline float ValueAt(const std::string& name, int64_t row, int64_t col) {
  uint64_t h = std::hash<std::string>{}(name) + static_cast<uint64_t>(row) * 1000003u +
               static_cast<uint64_t>(col) * 7919u;
  h *= 0x9e3779b97f4a7c15u;
  return static_cast<float>(static_cast<int64_t>(h >> 57) + 1) * ((h >> 40) & 1 ? 0.25f : -0.25f);
}

inline std::vector<float> ValuesOf(const RequiredTensor& tensor) {
  std::vector<float> values;
  for (int64_t r = 0; r < Rows(tensor); ++r) {
    for (int64_t c = 0; c < Cols(tensor); ++c) values.push_back(ValueAt(tensor.name, r, c));
  }
  return values;
}

// The bytes of `values` in `dtype`.
inline std::vector<unsigned char> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<unsigned char> bytes;
  auto put = [&](const void* data, size_t size) {
    const auto* at = static_cast<const unsigned char*>(data);
    bytes.insert(bytes.end(), at, at + size);
  };
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half =
        dtype == DType::kFloat16 ? ToFloat16(values[i]).bits : ToBFloat16(values[i]).bits;
    if (dtype == DType::kFloat32) {
      put(&values[i], 4);
    } else if (dtype == DType::kInt32) {
      const auto integer = static_cast<int32_t>(values[i]);
      put(&integer, 4);
    } else if (dtype == DType::kUInt8 || dtype == DType::kFloat8E4M3) {
      bytes.push_back(static_cast<unsigned char>(values[i]));
    } else if (dtype == DType::kUInt4) {  // Of each eight, byte j holds elements j and 4 + j.
      if (i % 8 < 4) {
        bytes.push_back(static_cast<unsigned char>(static_cast<int>(values[i]) |
                                                   static_cast<int>(values[i + 4]) << 4));
      }
    } else if (dtype == DType::kUInt2) {  // Of sixteen, byte j holds j, 4 + j, 8 + j and 12 + j.
      if (i % 16 < 4) {
        int byte = 0;
        for (size_t j = 0; j < 4; ++j) byte |= static_cast<int>(values[i + 4 * j]) << 2 * j;
        bytes.push_back(static_cast<unsigned char>(byte));
      }
    } else {
      put(&half, 2);
    }
  }
  return bytes;
}

// A dense view of rows x cols (or rows, for rank 1) elements.
inline TensorView ViewRows(const void* data, DType dtype, int32_t rank, int64_t rows,
                           int64_t cols) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = rank;
  view.dims[0] = rows;
  view.strides[0] = rank == 2 ? cols : 1;
  if (rank == 2) {
    view.dims[1] = cols;
    view.strides[1] = 1;
  }
  return view;
}

// Adds rows [begin, end) of `tensor`, by formula.
inline Status AddRows(ModelWriter& writer, const RequiredTensor& tensor, int64_t begin, int64_t end,
                      DType dtype = DType::kFloat32) {
  std::vector<float> values;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < Cols(tensor); ++c) values.push_back(ValueAt(tensor.name, r, c));
  }
  const std::vector<unsigned char> bytes = Encode(values, dtype);
  return writer.AddTensor(tensor.name, begin,
                          ViewRows(bytes.data(), dtype, static_cast<int32_t>(tensor.shape.size()),
                                   end - begin, Cols(tensor)));
}

inline std::vector<RequiredTensor> Required(const proto::DecoderSpec& spec) {
  return Must(RequiredTensors(spec));
}

inline RequiredTensor TensorNamed(const proto::DecoderSpec& spec, const std::string& name) {
  for (const RequiredTensor& tensor : Required(spec)) {
    if (tensor.name == name) return tensor;
  }
  throw std::runtime_error(name);
}

// Writes the whole model by formula; to files when a path is given.
inline std::shared_ptr<const ModelImage> BuildModel(const proto::DecoderSpec& spec,
                                                    DType dtype = DType::kFloat32,
                                                    ThreadPool* pool = nullptr,
                                                    const std::string& stem = "") {
  proto::BuildRecord build;
  build.set_version("1.2.3");
  build.set_source("formula");
  (*build.mutable_options())["b"] = "2";
  (*build.mutable_options())["a"] = "1";
  const auto writer = Must(ModelWriter::Create(spec, build, stem.empty() ? "" : stem + ".asgraph",
                                               stem.empty() ? "" : stem + ".asparam", pool));
  for (const RequiredTensor& tensor : Required(spec)) {
    if (tensor.layout == proto::PANEL64_SCALE) continue;  // Comes with the weight.
    Must(AddRows(*writer, tensor, 0, Rows(tensor), dtype));
  }
  return Must(writer->Finish());
}

// The stored form of `values`, element by element, as the README defines it.
inline std::vector<unsigned char> PlainStored(const RequiredTensor& tensor,
                                              const std::vector<float>& values) {
  if (tensor.layout == proto::ROW_MAJOR) return Encode(values, tensor.dtype);
  const int64_t n = Rows(tensor);
  const int64_t k = Cols(tensor);
  const std::map<DType, int64_t> groups = {
      {DType::kFloat32, 1}, {DType::kBFloat16, 2}, {DType::kFloat16, 2},   {DType::kUInt8, 4},
      {DType::kUInt4, 8},   {DType::kUInt2, 16},   {DType::kFloat8E4M3, 4}};
  const int64_t group = tensor.layout == proto::PANEL64 ? groups.at(tensor.dtype) : 1;
  std::vector<float> packed(static_cast<size_t>((n + 63) / 64 * 64 * k));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      const int64_t at =
          (((row / 64) * (k / group) + col / group) * 64 + row % 64) * group + col % group;
      packed[static_cast<size_t>(at)] = values[static_cast<size_t>(row * k + col)];
    }
  }
  return Encode(packed, tensor.dtype);
}

// An image whose bytes a test chooses.
class FakeImage final : public ModelImage {
 public:
  FakeImage(std::string graph, const std::string& param) : graph_(std::move(graph)) {
    bytes_ = static_cast<int64_t>(param.size());
    const size_t room = static_cast<size_t>(AlignUp(bytes_ + 1, 64));
    param_.reset(static_cast<unsigned char*>(std::aligned_alloc(64, room)));
    std::memcpy(param_.get(), param.data(), param.size());
  }
  std::string_view graph() const override { return graph_; }
  const unsigned char* param() const override { return param_.get(); }
  int64_t param_bytes() const override { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::string graph_;
  std::unique_ptr<unsigned char, Free> param_;
  int64_t bytes_ = 0;
};

inline std::string GraphOf(const ModelImage& image) { return std::string(image.graph()); }
inline std::string ParamOf(const ModelImage& image) {
  return {reinterpret_cast<const char*>(image.param()), static_cast<size_t>(image.param_bytes())};
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// Fails unless `status` has `code` and its message contains all `parts`.
inline void ExpectError(const Status& status, StatusCode code,
                        const std::vector<std::string>& parts) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  for (const std::string& part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "\"" << part << "\" is not in: " << status.ToString();
  }
}

}  // namespace allspark::testing
