// Opens a serialised model, starts three requests and prints their tokens as they come.
// usage: stream_three NAME.asgraph

#include <allspark/engine.h>
#include <poll.h>

#include <cstdio>
#include <set>

namespace {

int Fail(const allspark::Status& status) {
  std::fprintf(stderr, "stream_three: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fputs("usage: stream_three NAME.asgraph\n", stderr), 2;
  allspark::Engine engine;
  allspark::RuntimeConfig config;
  config.model_name = "model";
  config.model_path = argv[1];
  config.engine_max_length = 128;
  config.engine_max_batch = 4;
  if (auto status = engine.InstallModel(config); !status.ok()) return Fail(status);
  if (auto status = engine.StartModel("model"); !status.ok()) return Fail(status);

  allspark::GenerationConfig generation;
  generation.do_sample = false;
  generation.max_new_tokens = 16;
  std::vector<allspark::StartedRequest> requests;
  std::set<uint64_t> running;
  for (int64_t first = 1; first <= 3; ++first) {
    const std::vector<int64_t> prompt = {first, first + 1, first + 2};
    auto started = engine.StartRequest("model", prompt, generation);
    if (!started.ok()) return Fail(started.status());
    requests.push_back(*started);
    running.insert(started->handle.id);
  }

  // One descriptor signals for all requests; an event loop would watch it with its sockets.
  pollfd changed{.fd = engine.completions()->fd(), .events = POLLIN, .revents = 0};
  while (!running.empty() && poll(&changed, 1, -1) >= 0) {
    for (const auto& queue : engine.completions()->Drain()) {
      const bool ended = allspark::IsTerminal(queue->GenerateStatus());
      while (auto elements = queue->GetNoWait()) {
        for (int64_t id : elements->ids_from_generate) {
          std::printf("request %lu: %ld\n", queue->request_id(), id);
        }
      }
      if (ended) running.erase(queue->request_id());
    }
  }
  return 0;
}
