// The log's lines of a model's work, and the trace.

#include <unistd.h>

#include <fstream>

#include "base/log.h"
#include "cpp/engine/engine_harness.h"
#include "engine/step_trace.h"
#include "support/environment.h"
#include "support/temp_dir.h"

namespace allspark::testing {
namespace {

class ObservationTest : public EngineTest {
 protected:
  void TearDown() override { ConfigureLog(LogConfig()); }

  static std::string Read(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The log's lines whose message begins with `message`, without the text before the message.
  std::vector<std::string> Lines(const std::string& message) const {
    std::ifstream file(dir_ / ("allspark." + std::to_string(getpid()) + ".log"));
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
      const size_t begin = line.find("] ") + 2;
      if (line.compare(begin, message.size(), message) == 0) lines.push_back(line.substr(begin));
    }
    return lines;
  }

  const TempDir dir_;
};

TEST_F(ObservationTest, TheLogSaysNothingUnasked) {
  ConfigureLog({LogLevel::kWarning, dir_.path()});
  InstallAndStart(SmallConfig());
  Run({1, 2, 3}, Greedy(4));
  ASSERT_OK(engine_->StopModel("m"));
  EXPECT_TRUE(Lines("").empty());
}

TEST_F(ObservationTest, AskedForStepsAndTokens) {
  ConfigureLog({LogLevel::kWarning, dir_.path()});
  const ScopedVariable steps_asked("ALLSPARK_TIME_LOG", "1");
  const ScopedVariable tokens_asked("ALLSPARK_DUMP_OUTPUT_TOKEN", "1");
  InstallAndStart(SmallConfig());
  const StartedRequest request = Start({1, 2, 3}, Greedy(4));
  const Ids ids = ReadAll(*request.queue);
  ASSERT_OK(engine_->StopModel("m"));
  const std::vector<std::string> steps = Lines("step ");
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_TRUE(steps[0].starts_with("step model=m sequences=1 decodes=0 prefill_tokens=3 plan_us="))
      << steps[0];
  EXPECT_TRUE(steps[1].starts_with("step model=m sequences=1 decodes=1 prefill_tokens=0 plan_us="));
  std::string text;
  for (const int64_t id : ids) {
    if (!text.empty()) text += ',';
    text += std::to_string(id);
  }
  EXPECT_EQ(Lines("output"),
            std::vector<std::string>{"output model=m request=" + std::to_string(request.handle.id) +
                                     " token_ids=[" + text + "]"});
  EXPECT_TRUE(Lines("request ended").empty()) << "that is for the debug level";
}

TEST_F(ObservationTest, RequestsEndsAtTheDebugLevel) {
  ConfigureLog({LogLevel::kDebug, dir_.path()});
  InstallAndStart(SmallConfig());
  GenerationConfig beams = Greedy(3);
  beams.num_beams = 2;
  Run({1, 2, 3}, Greedy(4));
  Run({1, 2, 3}, beams);
  ASSERT_OK(engine_->StopModel("m"));
  const std::vector<std::string> ends = Lines("request ended");
  ASSERT_EQ(ends.size(), 2u);
  EXPECT_NE(ends[0].find(" reason=length prompt_tokens=3 output_tokens=4 queue_ms="),
            std::string::npos)
      << ends[0];
}

TEST_F(ObservationTest, AStatusLineAnInterval) {
  for (const char* variable : {"HIE_LOG_STATUS_INTERVAL", "HIE_LOG_SATAUS_INTERVAL"}) {
    ConfigureLog({LogLevel::kInfo, dir_.path()});
    const ScopedVariable interval(variable, "1");
    const std::string name = std::string("m") + variable[9];
    InstallAndStart(SmallConfig(name));
    hook_.Set([](const StepEvent& event) {
      if (event.phase == StepPhase::kBegin) usleep(10000);
    });
    Run({1, 2, 3}, Greedy(230), name);  // takes 2.3 seconds
    ASSERT_OK(engine_->StopModel(name));
    const std::vector<std::string> lines = Lines("status model=" + name);
    EXPECT_GE(lines.size(), 2u);
    ASSERT_FALSE(lines.empty());
    EXPECT_NE(lines[0].find(" running=1 waiting=0 generated_tokens_per_second="), std::string::npos)
        << lines[0];
  }
  const ScopedVariable interval("HIE_LOG_STATUS_INTERVAL", "soon");
  InstallAndStart(SmallConfig("other"));
  EXPECT_EQ(Lines("HIE_LOG_STATUS_INTERVAL is \"soon\"").size(), 1u);
}

TEST_F(ObservationTest, TheTraceIsWrittenAtTheStopAndOnCall) {
  RuntimeConfig config = SmallConfig();
  config.trace_path = dir_ / "trace.json";
  InstallAndStart(config);
  Run({1, 2, 3}, Greedy(4));
  const std::string now = dir_ / "now.json";
  ASSERT_OK(engine_->WriteTrace("m", now));
  EXPECT_NE(Read(now).find("\"reason\":\"length\""), std::string::npos);
  EXPECT_EQ(Read(config.trace_path).find("\"name\":\"step\""), std::string::npos);
  ASSERT_OK(engine_->StopModel("m"));
  const std::string text = Read(config.trace_path);
  size_t steps = 0;
  for (size_t at = 0; (at = text.find("\"name\":\"step\"", at)) != std::string::npos; ++at) ++steps;
  EXPECT_EQ(steps, 4u);
  const Status status = engine_->WriteTrace("m", dir_ / "missing/trace.json");
  EXPECT_EQ(status.as_status(), AsStatus::kIoError);
  EXPECT_NE(status.message().find("missing/trace.json"), std::string::npos);
}

TEST_F(ObservationTest, ATraceThatCannotBeWrittenIsRefusedAtInstall) {
  RuntimeConfig config = SmallConfig();
  config.trace_path = dir_ / "missing/trace.json";
  ASSERT_OK(engine_->RegisterImage("m", MakeRandomModel(TinyLlamaSpec(), 1)));
  EXPECT_EQ(engine_->InstallModel(config).as_status(), AsStatus::kIoError);
  config.trace_path = "";
  ASSERT_OK(engine_->InstallModel(config));
  const Status status = engine_->WriteTrace("m", dir_ / "trace.json");
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("trace_path"), std::string::npos);
}

// The first number of a line of the table: how often the operation was called.
int64_t CallsOf(const std::string& table, const std::string& operation) {
  const size_t at = table.find("\n" + operation + " ");
  return at == std::string::npos ? 0 : std::stoll(table.substr(at + 1 + operation.size()));
}

TEST_F(ObservationTest, OperationsAreMeasuredWhereThatIsAskedFor) {
  RuntimeConfig config = SmallConfig();
  config.op_profiling = true;
  InstallAndStart(config);
  const std::string empty = *engine_->GetOpProfilingInfo("m");
  EXPECT_EQ(empty.find("model 'm', "), 0u) << empty;
  EXPECT_EQ(CallsOf(empty, "qkv"), 0) << "the warm-up was counted:\n" << empty;
  Run({1, 2, 3}, Greedy(4));
  const auto check = [&](int64_t steps) {
    const std::string table = *engine_->GetOpProfilingInfo("m");
    const int64_t layers = TinyLlamaSpec().num_layers();
    EXPECT_EQ(CallsOf(table, "between operations"), steps) << table;
    EXPECT_EQ(CallsOf(table, "gate_up"), steps * layers) << table;
    EXPECT_EQ(CallsOf(table, "attention"), steps * layers) << table;
    EXPECT_EQ(CallsOf(table, "lm_head"), steps) << table;
    EXPECT_EQ(CallsOf(table, "sampling"), steps) << table;
  };
  check(4);
  // The profile continues from one run to the next.
  ASSERT_OK(engine_->StopModel("m"));
  check(4);
  ASSERT_OK(engine_->StartModel("m"));
  Run({1, 2, 3}, Greedy(2));
  ASSERT_OK(engine_->StopModel("m"));
  check(6);
}

TEST_F(ObservationTest, AProfileIsReadWhileStepsRun) {
  RuntimeConfig config = SmallConfig();
  config.op_profiling = true;
  InstallAndStart(config);
  const StartedRequest request = Start({1, 2, 3}, Greedy(200));
  int64_t last = 0;
  while (last < 50) {
    const int64_t calls = CallsOf(*engine_->GetOpProfilingInfo("m"), "lm_head");
    ASSERT_GE(calls, last);
    last = calls;
  }
  ASSERT_OK(engine_->SyncRequest("m", request.handle));
}

TEST_F(ObservationTest, AProfileThatIsNotKeptIsRefused) {
  InstallAndStart(SmallConfig());
  const Status off = engine_->GetOpProfilingInfo("m").status();
  EXPECT_EQ(off.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(off.message().find("op_profiling of model 'm' is off"), std::string::npos);
  EXPECT_EQ(engine_->GetOpProfilingInfo("x").status().code(), StatusCode::kNotFound);
}

TEST(StepTraceTest, KeepsTheLastRecords) {
  StepTrace trace("m", 3);
  for (int64_t i = 1; i <= 5; ++i) {
    trace.Add(StepRecord{.begin_us = i * 10, .delivered_us = i * 10 + 5, .num_sequences = i});
  }
  const std::string json = trace.Json();
  EXPECT_EQ(json.find("\"sequences\":2"), std::string::npos);
  const size_t third = json.find("\"sequences\":3"), last = json.find("\"sequences\":5");
  EXPECT_LT(third, last);
  EXPECT_NE(last, std::string::npos);
}

}  // namespace
}  // namespace allspark::testing
