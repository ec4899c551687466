#include "model/moe.h"

#include "model/residual.h"
#include "ops/linear.h"
#include "ops/quantize.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

// Rows [begin, end) of a matrix, int8 or not.
Matrix Rows(Matrix x, int64_t begin, int64_t end) {
  x.data = static_cast<unsigned char*>(x.data) + begin * x.ld * ElementBytes(x.dtype);
  x.rows = end - begin;
  if (x.row_scale != nullptr) x.row_scale += begin * x.num_scales();
  if (x.row_sums != nullptr) x.row_sums += begin * kernels::RowSums(x.cols);
  return x;
}

// One product of the experts' MLPs, and of the shared expert's.
struct ExpertLinear {
  const LinearWeight& weight;  // of all experts
  Matrix x, y, scratch;        // rows of pairs
};

void AddTasks(const DecoderShape& shape, const Routing& routing, const ExpertLinear& linear,
              std::vector<LinearTask>& tasks) {
  const int64_t experts = shape.router.num_experts;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = routing.begins[e], end = routing.begins[e + 1];
    if (begin == end) continue;
    LinearTask task{Rows(linear.x, begin, end),
                    WeightOf(linear.weight, experts, e),
                    Rows(linear.y, begin, end),
                    {},
                    {}};
    if (linear.scratch.data != nullptr) task.scratch = Rows(linear.scratch, begin, end);
    tasks.push_back(task);
  }
}

// Where gate and up write their result: `gated`, or float32 if it is quantised afterwards.
Matrix GatedOutput(const Matrix& gated, const Matrix& gated_float) {
  return gated.dtype == DType::kInt8 ? gated_float : gated;
}

}  // namespace

size_t MaxExpertTasks(const DecoderShape& shape) {
  return shape.has_experts() ? static_cast<size_t>(shape.router.num_experts + 1) : 0;
}

void RunExperts(const OpContext& context, const DecoderShape& shape, const MoeWeights& weights,
                int64_t layer, LoraBatch& lora, const Workspace& w,
                std::vector<LinearTask>& tasks) {
  const MoeWorkspace& moe = w.moe;
  RouterParams router = shape.router;
  router.bias = weights.router_bias;
  // The stream is read anew where the next product wants it in another format.
  ConstMatrix normed = ReadResidual(context, weights.norm, weights.router.activation, w);
  const auto read_as = [&](const InputFormat& format) {
    if (normed.format() != format) normed = ReadResidual(context, weights.norm, format, w);
  };
  Linear(context, normed, weights.router, /*accumulate=*/false, moe.logits);
  Route(context, moe.logits, router, moe.routing);

  const Matrix gathered = moe.gathered.As(weights.gate_up.activation);
  read_as(gathered.format());
  GatherRows(context, normed, moe.routing.tokens, gathered);
  const Matrix gated = moe.gated.As(weights.down.activation);
  const Matrix shared_gated = moe.shared_gated.As(weights.shared_down.activation);
  tasks.clear();
  if (router.has_shared) {
    read_as(weights.shared_gate_up.activation);
    tasks.push_back({normed, weights.shared_gate_up,
                     GatedOutput(shared_gated, moe.shared_gated_float), moe.shared_gate_up,
                     lora.Layer(context, normed, layer, &LoraLayer::gate_up, w.lora)});
  }
  AddTasks(shape, moe.routing,
           {weights.gate_up, gathered, GatedOutput(gated, moe.gated_float), moe.gate_up}, tasks);
  LinearGatedEach(context, tasks, weights.activation);
  if (gated.dtype == DType::kInt8) Quantize(context, moe.gated_float, gated);

  const int64_t pairs = gathered.rows;
  tasks.clear();
  if (router.has_shared) {
    if (shared_gated.dtype == DType::kInt8) {
      Quantize(context, moe.shared_gated_float, shared_gated);
    }
    tasks.push_back({shared_gated,
                     weights.shared_down,
                     Rows(moe.outputs, pairs, moe.outputs.rows),
                     {},
                     lora.Layer(context, shared_gated, layer, &LoraLayer::down, w.lora)});
  }
  AddTasks(shape, moe.routing, {weights.down, gated, moe.outputs, {}}, tasks);
  LinearEach(context, tasks);
  const ResidualOut out = ResidualOutput(w);
  CombineExperts(context, moe.outputs, router, moe.routing, out.accumulates, out.y);
  FinishResidual(context, weights.post_norm, shape.residual_scaling, w);
}

}  // namespace allspark
