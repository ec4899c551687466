// A model from install to release: its config, its weights, the device and the sizes of its parts.
// Nothing here changes, so any thread may read it.
#pragma once

#include <memory>

#include "allspark/config.h"
#include "engine/model_sizes.h"
#include "weights/model_reader.h"

namespace allspark {

struct InstalledModel {
  // DataLoss once weights, a draft model's included, could not be read from their files.
  Status CheckWeights() const {
    for (const ModelReader* weights : {reader.get(), draft_reader.get()}) {
      if (weights != nullptr) AS_RETURN_IF_ERROR(weights->CheckViews());
    }
    return Status::Ok();
  }

  RuntimeConfig config;
  std::unique_ptr<ModelReader> reader;
  std::unique_ptr<ModelReader> draft_reader;  // null: no draft model
  std::shared_ptr<Device> device;
  ModelSizes sizes;
};

}  // namespace allspark
