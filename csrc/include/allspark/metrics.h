// Metrics for operators, in the terms of Prometheus: Engine::GetMetrics takes a snapshot of all
// models, MetricsText writes it as the text of a server's /metrics page.
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
  double value = 0;                           // of a histogram: the sum of its observations
  // Of a histogram: for each of Metric::bounds the number of observations up to it, then of all.
  std::vector<int64_t> buckets = {};
};

struct Metric {
  enum class Kind : int { kCounter = 0, kGauge = 1, kHistogram = 2 };
  std::string name;  // as in the text form; a counter's name ends in _total
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
