// What an operator watches, in the terms of Prometheus: Engine::GetMetrics takes a snapshot of all
// models, MetricsText writes it as a server's /metrics page has it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] allspark {

// One series of a metric.
struct MetricSample {
  std::map<std::string, std::string> labels;  // "model" is always one of them
  double value = 0;                           // of a histogram: the sum of what was observed
  // Of a histogram: observations up to each of Metric::bounds, and then all of them.
  std::vector<int64_t> buckets = {};
};

struct Metric {
  enum class Kind : int { kCounter = 0, kGauge = 1, kHistogram = 2 };
  std::string name;  // as in the text form, where a counter's ends in _total
  std::string help;
  Kind kind = Kind::kCounter;
  std::vector<double> bounds = {};  // of a histogram, ascending
  std::vector<MetricSample> samples = {};
};

// "counter", "gauge", "histogram".
std::string_view MetricKindName(Metric::Kind kind);
// The text format of Prometheus, version 0.0.4: text/plain; version=0.0.4.
std::string MetricsText(const std::vector<Metric>& metrics);

}  // namespace allspark
