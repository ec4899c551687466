// The one table of metric names: which of a model's statistics an operator sees. Any thread.
#pragma once

#include <vector>

#include "allspark/metrics.h"
#include "engine/statistics.h"

namespace allspark {

// The metrics of one model, always the same ones in the same order.
std::vector<Metric> MakeMetrics(const EngineStat& stat, const Statistics& statistics);
// Adds the series of another model.
void MergeMetrics(std::vector<Metric>& metrics, const std::vector<Metric>& others);

}  // namespace allspark
