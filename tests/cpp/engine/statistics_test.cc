// Statistics and metrics, against counts that the test keeps itself.

#include <chrono>
#include <set>
#include <sstream>
#include <thread>

#include "cpp/engine/engine_harness.h"
#include "cpp/engine/function_mask.h"
#include "engine/metrics.h"
#include "engine/statistics.h"

namespace allspark::testing {
namespace {

class StatisticsTest : public EngineTest {
 protected:
  // A step's own time is counted after its tokens are delivered.
  void AwaitIdle() {
    ASSERT_OK(engine_->SyncAllRequests("m"));
    Run({1}, Greedy(1));
    ASSERT_OK(engine_->StopModel("m"));
  }
  EngineStat Stat() { return *engine_->GetEngineStat("m"); }
  Metric Find(const std::string& name) {
    for (const Metric& metric : engine_->GetMetrics()) {
      if (metric.name == name) return metric;
    }
    ADD_FAILURE() << "no metric " << name;
    return {};
  }
  int64_t Count(const std::string& name) { return Find(name).samples.at(0).buckets.back(); }
  double Sum(const std::string& name) { return Find(name).samples.at(0).value; }
};

TEST_F(StatisticsTest, AgreeWithAnAccountOfTheRequests) {
  RuntimeConfig runtime = SmallConfig();
  runtime.engine_max_batch = 4;
  Install(runtime);
  int64_t num_steps = 0, num_decodes = 0, num_prefilled = 0;
  const HookGuard guard(hook_);
  hook_.Set([&](const StepEvent& event) {
    if (event.phase != StepPhase::kBegin) return;
    ++num_steps;
    num_decodes += event.num_decodes;
    num_prefilled += event.num_prefill_tokens;
  });
  ASSERT_OK(engine_->StartModel("m"));
  struct Job {
    StartedRequest request;
    int64_t prompt_length;
  };
  std::vector<Job> jobs;
  const auto start = [&](const Ids& prompt, const GenerationConfig& config,
                         std::shared_ptr<TokenMask> mask = nullptr) {
    auto started = engine_->StartRequest("m", prompt, config, std::move(mask));
    ASSERT_TRUE(started.ok()) << started.status().ToString();
    jobs.push_back({*started, static_cast<int64_t>(prompt.size())});
  };
  start({1, 2, 3}, Greedy(3));
  GenerationConfig stops = Greedy(20);
  stops.eos_token_id = ReadAll(*jobs[0].request.queue).back();
  GenerationConfig expires = Greedy(200);
  expires.timeout_ms = 1;
  GenerationConfig prompt_only;
  prompt_only.prompt_only = true;
  for (int i = 0; i < 5; ++i) {
    start({1, 2, 3}, stops);
    start(RandomPrompt(rng_, 10 + i * 13, vocab_size_), Greedy(4 + i));
    start(RandomPrompt(rng_, 40 + i, vocab_size_), prompt_only);
    start({4, 5}, Greedy(9),
          std::make_shared<FunctionMask>([](FunctionMask& mask, int32_t) { mask.Fail("broken"); }));
    start({6, 7}, Greedy(250));
    EXPECT_OK(engine_->StopRequest("m", jobs.back().request.handle));
    start({8, 9, 10}, expires);
  }
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_FALSE(engine_->StartRequest("m", Ids{}, Greedy(1)).ok());

  const auto prompts = static_cast<int64_t>(jobs.size());
  std::map<FinishReason, int64_t> reasons;
  int64_t prompt_total = 0, outputs = 0, first_tokens = 0;
  for (const Job& job : jobs) {
    ++reasons[job.request.queue->finish_reason()];
    prompt_total += job.prompt_length;
    outputs += static_cast<int64_t>(job.request.queue->GeneratedLength());
    first_tokens += job.request.queue->GeneratedLength() > 0 ? 1 : 0;
  }
  const EngineStat stat = Stat();
  EXPECT_EQ(stat.finished_stop, reasons[FinishReason::kStop]);
  EXPECT_EQ(stat.finished_stop, 5);
  EXPECT_EQ(stat.finished_length, reasons[FinishReason::kLength]);
  EXPECT_EQ(stat.finished_cancelled, reasons[FinishReason::kCancelled]);
  EXPECT_EQ(stat.finished_deadline, reasons[FinishReason::kDeadline]);
  EXPECT_EQ(stat.finished_error, 5);
  EXPECT_EQ(stat.finished_interrupted, 0);
  EXPECT_EQ(stat.denied_request, 0) << "bad input is not denied, it is refused";
  EXPECT_EQ(stat.total_generated_token, outputs);
  EXPECT_EQ(stat.num_steps, num_steps);
  EXPECT_EQ(stat.total_prefill_token, num_prefilled);
  EXPECT_EQ(stat.running_request + stat.pending_request, 0);
  EXPECT_EQ(stat.num_preemptions, 0);
  EXPECT_EQ(Count("allspark_prompt_tokens"), prompts);
  EXPECT_EQ(Sum("allspark_prompt_tokens"), static_cast<double>(prompt_total));
  EXPECT_EQ(Count("allspark_output_tokens"), prompts);
  EXPECT_EQ(Sum("allspark_output_tokens"), static_cast<double>(outputs));
  EXPECT_EQ(Count("allspark_request_seconds"), prompts);
  EXPECT_EQ(Count("allspark_time_to_first_token_seconds"), first_tokens);
  EXPECT_EQ(Count("allspark_inter_token_seconds"), outputs - first_tokens);
  EXPECT_EQ(Count("allspark_step_sequences"), num_steps);
  EXPECT_GE(Sum("allspark_step_sequences"), static_cast<double>(num_decodes));

  // The sums of times equal those of the requests' own statistics, which are truncated to
  // milliseconds.
  double queue_ms = 0, first_ms = 0;
  for (const Job& job : jobs) {
    const auto info = job.request.queue->RequestStatInfo();
    const bool has_begun = info.at("finished_time") > 0 || info.at("generated_token_length") > 0;
    if (has_begun) queue_ms += static_cast<double>(info.at("time_in_queue"));
    first_ms += static_cast<double>(info.at("time_to_first_token"));
  }
  EXPECT_GE(Sum("allspark_time_to_first_token_seconds") * 1e3, first_ms);
  EXPECT_LE(Sum("allspark_time_to_first_token_seconds") * 1e3,
            first_ms + static_cast<double>(prompts));
  EXPECT_GE(Sum("allspark_queue_seconds") * 1e3, queue_ms);
  AwaitIdle();
  EXPECT_EQ(Count("allspark_step_seconds"), num_steps);
  EXPECT_GT(Sum("allspark_step_seconds"), 0);
}

TEST_F(StatisticsTest, AStopSaysWhy) {
  InstallAndStart(SmallConfig());
  GateSteps();
  const HookGuard guard(hook_);
  gate_.Close();
  GenerationConfig samples = Greedy(100);
  samples.do_sample = true;
  samples.best_of = 2;
  const StartedRequest complete = Start({1, 2, 3}, Greedy(100));
  const StartedRequest cancelled = Start({1, 2, 3}, Greedy(100));
  const StartedRequest group = Start({1, 2, 3}, samples);
  gate_.WaitArrived();
  const Status refused = engine_->StopRequest("m", complete.handle, FinishReason::kLength);
  EXPECT_EQ(refused.message(), "stop_request: reason is length; it must be cancelled or stop");
  EXPECT_OK(engine_->StopRequest("m", complete.handle, FinishReason::kStop));
  EXPECT_OK(engine_->StopRequest("m", complete.handle));  // The first stop counts.
  EXPECT_OK(engine_->StopRequest("m", cancelled.handle));
  EXPECT_OK(engine_->StopRequest("m", group.handle, FinishReason::kStop));
  gate_.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(complete.queue->finish_reason(), FinishReason::kStop);
  EXPECT_EQ(cancelled.queue->finish_reason(), FinishReason::kCancelled);
  EXPECT_EQ(group.queue->finish_reason(), FinishReason::kCancelled) << "it gives nothing";
  EXPECT_EQ(Stat().finished_stop, 1);
  EXPECT_EQ(Stat().finished_cancelled, 2);
}

// Rates of steps of 10 ms with 5 tokens each: 500 tokens a second from the first step on.
TEST(Statistics, RatesBeginWithAPausesEnd) {
  Statistics statistics;
  int64_t now_us = 3600'000'000;
  const auto rate = [&](int64_t at_us) {
    EngineStat stat;
    stat.total_blocks = 1;
    statistics.Report(stat, at_us);
    return stat.generate_token_persec;
  };
  EXPECT_EQ(rate(now_us), 0);
  for (const int num_steps : {1, 20, 99, 450}) {
    for (int i = 0; i < num_steps; ++i) {
      for (int token = 0; token < 5; ++token) statistics.OnToken();
      StepRecord step;
      step.begin_us = now_us;
      step.delivered_us = now_us += 10'000;
      statistics.OnStepEnd(step);
      EXPECT_DOUBLE_EQ(rate(now_us), 500) << "step " << i << " of " << num_steps;
    }
    EXPECT_EQ(rate(now_us + 3'000'000), 0);
    now_us += 5'000'000;
  }
}

// Every number has the name of what it counts, and the kind that its name says.
TEST(Statistics, MetricsAreNamedAfterWhatTheyCount) {
  EngineStat stat;
  std::map<std::string, double> expected;
  const auto set = [&](const std::string& name, int64_t& number) {
    number = static_cast<int64_t>(expected.size()) + 1;
    expected["allspark_" + name] = static_cast<double>(number);
  };
  set("requests_running", stat.running_request);
  set("requests_waiting", stat.pending_request);
  set("requests_blocked", stat.blocked_request);
  set("kv_blocks", stat.total_blocks);
  set("kv_blocks_used", stat.used_blocks);
  set("kv_blocks_cached", stat.cached_blocks);
  set("output_tensor_bytes", stat.output_tensor_bytes);
  set("device_memory_pool_bytes", stat.total_device_memory_pool_size);
  set("device_memory_used_bytes", stat.used_device_memory_pool_size);
  set("generated_tokens_total", stat.total_generated_token);
  set("prefill_tokens_total", stat.total_prefill_token);
  set("prefix_cache_hit_tokens_total", stat.prefix_cache_hit_token);
  set("draft_tokens_total", stat.total_draft_token);
  set("accepted_draft_tokens_total", stat.total_accepted_draft_token);
  set("steps_total", stat.num_steps);
  set("preemptions_total", stat.num_preemptions);
  set("requests_denied_total", stat.denied_request);
  set("requests_finished_total stop", stat.finished_stop);
  set("requests_finished_total length", stat.finished_length);
  set("requests_finished_total cancelled", stat.finished_cancelled);
  set("requests_finished_total deadline", stat.finished_deadline);
  set("requests_finished_total interrupted", stat.finished_interrupted);
  set("requests_finished_total error", stat.finished_error);
  std::map<std::string, double> found;
  for (const Metric& metric : MakeMetrics(stat, Statistics())) {
    if (metric.kind == Metric::Kind::kHistogram) continue;
    EXPECT_EQ(metric.kind == Metric::Kind::kCounter, metric.name.ends_with("_total"))
        << metric.name;
    for (const MetricSample& sample : metric.samples) {
      const auto reason = sample.labels.find("reason");
      found[metric.name + (reason == sample.labels.end() ? "" : " " + reason->second)] =
          sample.value;
    }
  }
  EXPECT_EQ(found, expected);
}

// A rate forgets what was more than two seconds ago.
TEST(Statistics, RatesFollowTheLastSeconds) {
  Statistics statistics;
  EngineStat stat;
  stat.total_blocks = 1;
  int64_t now_us = 5'000'000;
  for (int i = 0; i < 60; ++i) {
    if (i < 30) statistics.OnToken();
    StepRecord step;
    step.begin_us = now_us;
    step.delivered_us = now_us += 100'000;
    statistics.OnStepEnd(step);
    statistics.Report(stat, now_us);
    if (i < 30) {
      EXPECT_DOUBLE_EQ(stat.generate_token_persec, 10);
    }
    if (i >= 50) {
      EXPECT_EQ(stat.generate_token_persec, 0);
    }
  }
}

TEST_F(StatisticsTest, PrefillAndPrefixHitsAddUpToThePrompts) {
  InstallAndStart(SmallConfig());
  const Ids prompt = RandomPrompt(rng_, 100, vocab_size_);
  for (int i = 0; i < 3; ++i) Run(prompt, Greedy(2));
  const EngineStat stat = Stat();
  EXPECT_EQ(stat.prefix_cache_hit_token, 2 * 96) << "whole blocks of 16, the last token computed";
  EXPECT_EQ(stat.total_prefill_token, 300 - 2 * 96);
  EXPECT_EQ(stat.prefix_cache_miss_token, stat.total_prefill_token);
  EXPECT_DOUBLE_EQ(stat.prefix_cache_hit_rate, 2.0 * 96 / 300);
  EXPECT_DOUBLE_EQ(stat.prefix_cache_hit_rate + stat.prefix_cache_miss_rate, 1);
  EXPECT_EQ(stat.total_token, stat.total_blocks * stat.block_size);
  EXPECT_EQ(stat.free_token, stat.free_blocks * stat.block_size);
}

TEST_F(StatisticsTest, GroupsCountAsOneRequest) {
  InstallAndStart(SmallConfig());
  GenerationConfig beams = Greedy(6);
  beams.num_beams = beams.num_return_sequences = 3;
  GenerationConfig samples;
  samples.max_new_tokens = 5;
  samples.best_of = 4;
  Run({1, 2, 3}, beams);
  Run({1, 2, 3}, samples);
  EXPECT_EQ(Stat().finished_length, 2);
  EXPECT_EQ(Count("allspark_request_seconds"), 2);
  EXPECT_EQ(Count("allspark_queue_seconds"), 2);
  EXPECT_EQ(Count("allspark_time_to_first_token_seconds"), 2);
  EXPECT_EQ(Sum("allspark_output_tokens"), 6 + 5) << "the longest of each";
  EXPECT_EQ(Count("allspark_inter_token_seconds"), 0) << "all tokens come at once";
}

TEST_F(StatisticsTest, DeniedAndInterruptedRequestsAreCounted) {
  RuntimeConfig config = SmallConfig();
  config.max_waiting_requests = 1;
  config.num_blocks = 16;  // one sequence of 256 tokens
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  GenerationConfig beams = Greedy(150);
  beams.num_beams = 8;
  const StartedRequest search = Start(RandomPrompt(rng_, 100, vocab_size_), beams);
  for (int i = 0; i < 8; ++i) Start({1}, Greedy(2));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(engine_->StartRequest("m", Ids{1}, Greedy(2)).ok());
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  EXPECT_EQ(search.queue->finish_reason(), FinishReason::kInterrupted);
  EXPECT_EQ(Stat().denied_request, 3);
  EXPECT_EQ(Stat().finished_interrupted, 1);
  EXPECT_EQ(Stat().finished_length, 8);
}

TEST_F(StatisticsTest, ARequestsOwnStatisticsAreDefinedAlways) {
  RuntimeConfig config = SmallConfig();
  config.engine_max_batch = 1;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  const StartedRequest running = Start({1, 2, 3}, Greedy(3));
  GenerationConfig prompt_config;
  prompt_config.prompt_only = true;
  const StartedRequest prompt_only = Start(Ids(200, 5), prompt_config);
  const StartedRequest withdrawn = Start({1, 2, 3}, Greedy(3));
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  auto info = withdrawn.queue->RequestStatInfo();
  EXPECT_GE(info.at("time_in_queue"), 10) << "it goes on while a request waits";
  for (const char* key : {"first_token_time", "last_token_time", "time_to_first_token",
                          "finished_time", "context_tps", "generate_tps"}) {
    EXPECT_EQ(info.at(key), 0) << key;
  }
  EXPECT_OK(engine_->StopRequest("m", withdrawn.handle));
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  info = withdrawn.queue->RequestStatInfo();
  EXPECT_GE(info.at("time_in_queue"), 10);
  EXPECT_EQ(info.at("finished_time"), 0) << "it never began";
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(withdrawn.queue->RequestStatInfo(), info) << "and its time is over";
  info = prompt_only.queue->RequestStatInfo();
  EXPECT_GT(info.at("context_tps"), 0);
  EXPECT_EQ(info.at("time_to_first_token"), 0);
  EXPECT_EQ(info.at("context_token_length"), 200);
  info = running.queue->RequestStatInfo();
  EXPECT_EQ(info.at("generated_token_length"), 3);
  EXPECT_GE(info.at("time_to_first_token"), info.at("time_in_queue"));
}

TEST_F(StatisticsTest, PreemptionsKeepARequestsTimes) {
  RuntimeConfig config = SmallConfig();
  config.num_blocks = 16;
  Install(config);
  hook_.loop_gate.Close();
  ASSERT_OK(engine_->StartModel("m"));
  std::vector<StartedRequest> requests;
  for (int i = 0; i < 8; ++i) {
    requests.push_back(Start(RandomPrompt(rng_, 20, vocab_size_), Greedy(100)));
  }
  hook_.loop_gate.Open();
  ASSERT_OK(engine_->SyncAllRequests("m"));
  const EngineStat stat = Stat();
  EXPECT_GT(stat.num_preemptions, 0);
  EXPECT_GT(stat.total_prefill_token + stat.prefix_cache_hit_token, 8 * 20) << "computed again";
  EXPECT_EQ(stat.total_generated_token, 8 * 100);
  EXPECT_EQ(Count("allspark_queue_seconds"), 8);
  EXPECT_EQ(Count("allspark_time_to_first_token_seconds"), 8);
  for (const StartedRequest& request : requests) {
    const auto info = request.queue->RequestStatInfo();
    EXPECT_LE(info.at("time_in_queue"), info.at("time_to_first_token"));
    EXPECT_LE(info.at("context_cached_length"), 20) << "of the prompt, the first time";
  }
}

TEST_F(StatisticsTest, TextOfTheMetrics) {
  EXPECT_EQ(MetricsText(engine_->GetMetrics()), "");
  InstallAndStart(SmallConfig("m"));
  RuntimeConfig odd = SmallConfig("a \"b\"\\\n");
  ASSERT_OK(engine_->RegisterImage(odd.model_name, MakeRandomModel(TinyLlamaSpec(), 1)));
  ASSERT_OK(engine_->InstallModel(odd));
  Run({1, 2, 3}, Greedy(4));
  const std::string text = MetricsText(engine_->GetMetrics());
  for (const char* line :
       {"# TYPE allspark_generated_tokens_total counter",
        "allspark_generated_tokens_total{model=\"m\"} 4",
        "allspark_generated_tokens_total{model=\"a \\\"b\\\"\\\\\\n\"} 0",
        "allspark_requests_finished_total{model=\"m\",reason=\"length\"} 1",
        "# TYPE allspark_kv_blocks gauge", "# TYPE allspark_prompt_tokens histogram",
        "allspark_prompt_tokens_bucket{le=\"2.0\",model=\"m\"} 0",
        "allspark_prompt_tokens_bucket{le=\"4.0\",model=\"m\"} 1",
        "allspark_prompt_tokens_bucket{le=\"+Inf\",model=\"m\"} 1",
        "allspark_prompt_tokens_sum{model=\"m\"} 3",
        "allspark_prompt_tokens_count{model=\"m\"} 1"}) {
    EXPECT_NE(text.find(std::string(line) + "\n"), std::string::npos) << line << " in\n" << text;
  }
  // Each line follows the format, and a metric's lines are contiguous.
  std::istringstream lines(text);
  std::set<std::string> seen;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# HELP ")) {
      const std::string name = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_TRUE(seen.insert(name).second) << name << " comes twice";
    }
  }
  EXPECT_EQ(seen.size(), engine_->GetMetrics().size());
}

}  // namespace
}  // namespace allspark::testing
