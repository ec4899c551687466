#include "engine/metrics.h"

#include <charconv>
#include <iterator>
#include <string>
#include <utility>

#include "base/field_list.h"

namespace allspark {
namespace {

using Kind = Metric::Kind;

struct Number {
  const char* name;
  const char* help;
  int64_t EngineStat::*value;
};
constexpr Number kGauges[] = {
    {"allspark_requests_running", "Requests in the running batch.", &EngineStat::running_request},
    {"allspark_requests_waiting", "Accepted requests that wait to run.",
     &EngineStat::pending_request},
    {"allspark_requests_blocked", "Starts of requests that wait for room.",
     &EngineStat::blocked_request},
    {"allspark_kv_blocks", "Blocks of the KV cache.", &EngineStat::total_blocks},
    {"allspark_kv_blocks_used", "Blocks of the KV cache that requests use.",
     &EngineStat::used_blocks},
    {"allspark_kv_blocks_cached", "Unused blocks that the prefix cache finds again.",
     &EngineStat::cached_blocks},
    {"allspark_output_tensor_bytes", "Bytes of the output tensors of waiting and running requests.",
     &EngineStat::output_tensor_bytes},
    {"allspark_device_memory_pool_bytes", "Bytes of the memory pool of the model's device.",
     &EngineStat::total_device_memory_pool_size},
    {"allspark_device_memory_used_bytes", "Bytes in use of that pool, by all of its models.",
     &EngineStat::used_device_memory_pool_size},
};
constexpr Number kCounters[] = {
    {"allspark_generated_tokens_total", "Tokens generated.", &EngineStat::total_generated_token},
    {"allspark_prefill_tokens_total", "Tokens computed that were not generated in the same step.",
     &EngineStat::total_prefill_token},
    {"allspark_prefix_cache_hit_tokens_total", "Tokens that the prefix cache had.",
     &EngineStat::prefix_cache_hit_token},
    {"allspark_draft_tokens_total", "Draft tokens.", &EngineStat::total_draft_token},
    {"allspark_accepted_draft_tokens_total", "Draft tokens that were accepted.",
     &EngineStat::total_accepted_draft_token},
    {"allspark_steps_total", "Steps.", &EngineStat::num_steps},
    {"allspark_preemptions_total", "Requests that gave their KV blocks back for a time.",
     &EngineStat::num_preemptions},
    {"allspark_requests_denied_total", "Requests that were denied for want of room.",
     &EngineStat::denied_request},
};
constexpr std::pair<FinishReason, int64_t EngineStat::*> kReasons[] = {
    {FinishReason::kStop, &EngineStat::finished_stop},
    {FinishReason::kLength, &EngineStat::finished_length},
    {FinishReason::kCancelled, &EngineStat::finished_cancelled},
    {FinishReason::kDeadline, &EngineStat::finished_deadline},
    {FinishReason::kInterrupted, &EngineStat::finished_interrupted},
    {FinishReason::kError, &EngineStat::finished_error},
};
struct Distribution {
  const char* name;
  const char* help;
  const Histogram& (Statistics::*histogram)() const;
};
constexpr Distribution kDistributions[] = {
    {"allspark_queue_seconds", "From a request's start to its first step.",
     &Statistics::queue_seconds},
    {"allspark_time_to_first_token_seconds", "From a request's start to its first token.",
     &Statistics::ttft_seconds},
    {"allspark_inter_token_seconds", "Between tokens of a request.", &Statistics::gap_seconds},
    {"allspark_request_seconds", "From a request's start to its end.",
     &Statistics::request_seconds},
    {"allspark_step_seconds", "Time of a step.", &Statistics::step_seconds},
    {"allspark_step_sequences", "Sequences in a step.", &Statistics::batch_size},
    {"allspark_prompt_tokens", "Prompt tokens of requests that ended.", &Statistics::prompt_tokens},
    {"allspark_output_tokens", "Output tokens of requests that ended.", &Statistics::output_tokens},
};

std::string Escaped(const std::string& value) {
  std::string text;
  for (const char c : value) {
    if (c == '\\' || c == '"') text += '\\';
    if (c == '\n') {
      text += "\\n";
    } else {
      text += c;
    }
  }
  return text;
}

// 'name{label="value"} number', a line.
void AddLine(std::string& text, const std::string& name,
             const std::map<std::string, std::string>& labels, const std::string& number) {
  text += name;
  const char* separator = "{";
  for (const auto& [label, value] : labels) {
    text += separator + label + "=\"" + Escaped(value) + '"';
    separator = ",";
  }
  text += (labels.empty() ? " " : "} ") + number + '\n';
}

// As prometheus_client writes it and Prometheus keeps it: with a point.
std::string FormatBound(double bound) {
  char digits[64];
  const auto end = std::to_chars(digits, std::end(digits), bound, std::chars_format::fixed).ptr;
  const std::string text(digits, end);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

void AddHistogram(std::string& text, const Metric& metric, const MetricSample& sample) {
  auto labels = sample.labels;
  for (size_t i = 0; i < sample.buckets.size(); ++i) {
    labels["le"] = i < metric.bounds.size() ? FormatBound(metric.bounds[i]) : "+Inf";
    AddLine(text, metric.name + "_bucket", labels, std::to_string(sample.buckets[i]));
  }
  AddLine(text, metric.name + "_sum", sample.labels, FormatValue(sample.value));
  AddLine(text, metric.name + "_count", sample.labels, std::to_string(sample.buckets.back()));
}

}  // namespace

std::vector<Metric> MakeMetrics(const EngineStat& stat, const Statistics& statistics) {
  const std::map<std::string, std::string> model{{"model", stat.model_name}};
  std::vector<Metric> metrics;
  const auto add = [&](const char* name, const char* help, Kind kind) -> Metric& {
    return metrics.emplace_back(Metric{.name = name, .help = help, .kind = kind});
  };
  for (const auto& [numbers, kind] :
       {std::pair{std::span<const Number>(kGauges), Kind::kGauge},
        std::pair{std::span<const Number>(kCounters), Kind::kCounter}}) {
    for (const Number& number : numbers) {
      add(number.name, number.help, kind).samples = {
          {.labels = model, .value = static_cast<double>(stat.*number.value)}};
    }
  }
  Metric& ended = add("allspark_requests_finished_total", "Requests that ended, by their reason.",
                      Kind::kCounter);
  for (const auto& [reason, value] : kReasons) {
    MetricSample& sample = ended.samples.emplace_back();
    sample.labels = model;
    sample.labels["reason"] = FinishReasonName(reason);
    sample.value = static_cast<double>(stat.*value);
  }
  for (const Distribution& distribution : kDistributions) {
    const Histogram& histogram = (statistics.*distribution.histogram)();
    Metric& metric = add(distribution.name, distribution.help, Kind::kHistogram);
    metric.bounds.assign(histogram.bounds().begin(), histogram.bounds().end());
    metric.samples = {
        {.labels = model, .value = histogram.sum(), .buckets = histogram.Cumulated()}};
  }
  return metrics;
}

void MergeMetrics(std::vector<Metric>& metrics, const std::vector<Metric>& others) {
  if (metrics.empty()) {
    metrics = others;
    return;
  }
  for (size_t i = 0; i < metrics.size(); ++i) {
    const std::vector<MetricSample>& samples = others[i].samples;
    metrics[i].samples.insert(metrics[i].samples.end(), samples.begin(), samples.end());
  }
}

std::string_view MetricKindName(Metric::Kind kind) {
  constexpr std::string_view kNames[] = {"counter", "gauge", "histogram"};
  return kNames[static_cast<int>(kind)];
}

std::string MetricsText(const std::vector<Metric>& metrics) {
  std::string text;
  for (const Metric& metric : metrics) {
    text += "# HELP " + metric.name + ' ' + metric.help + '\n';
    text += "# TYPE " + metric.name + ' ' + std::string(MetricKindName(metric.kind)) + '\n';
    for (const MetricSample& sample : metric.samples) {
      if (metric.kind == Kind::kHistogram) {
        AddHistogram(text, metric, sample);
      } else {
        AddLine(text, metric.name, sample.labels, FormatValue(sample.value));
      }
    }
  }
  return text;
}

}  // namespace allspark
