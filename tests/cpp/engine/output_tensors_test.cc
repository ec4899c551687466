#include "engine/output_tensors.h"

#include <gtest/gtest.h>

namespace allspark {
namespace {

TEST(OutputTensors, AreRefusedWhereMemoryIsShort) {
  GenerationConfig config;
  config.output_logits = OutputRows::kAll;
  const auto outputs = OutputTensors::Create(config, {.prompt_length = 5,
                                                      .num_positions = int64_t{1} << 24,
                                                      .hidden_size = 64,
                                                      .vocab_size = int64_t{1} << 24});
  ASSERT_FALSE(outputs.ok());
  EXPECT_EQ(outputs.status().code(), StatusCode::kResourceExhausted);
  const std::string& message = outputs.status().message();
  EXPECT_NE(
      message.find("the tensors of output_logits take 1073741824 MiB for up to 16777216 tokens"),
      std::string::npos)
      << message;
}

TEST(OutputTensors, ViewsAreOfTheRowsThatWereAskedFor) {
  GenerationConfig config;
  EXPECT_EQ(*OutputTensors::Create(config, {.prompt_length = 5, .num_positions = 9}), nullptr);
  config.output_last_hidden_state = OutputRows::kGeneration;
  const OutputTensors::Sizes sizes{
      .prompt_length = 5, .num_positions = 9, .hidden_size = 2, .vocab_size = 3};
  const std::shared_ptr<OutputTensors> outputs = *OutputTensors::Create(config, sizes);
  EXPECT_FALSE(outputs->WantsWholePrompt());
  EXPECT_EQ(outputs->hidden_states().Row(3), nullptr);
  EXPECT_EQ(outputs->logits().Row(4), nullptr);
  EXPECT_EQ(outputs->PooledRow(4), nullptr);
  for (int64_t position = 4; position < 9; ++position) {
    outputs->hidden_states().Row(position)[1] = static_cast<float>(position);
  }
  EXPECT_EQ(outputs->hidden_states().Row(9), nullptr);
  EXPECT_TRUE(outputs->Views(0, 4).empty());
  const auto first = outputs->Views(0, 6), rest = outputs->Views(6, 9);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first.at("hidden_states").shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(first.at("hidden_states").data.get()[1], 4);
  EXPECT_EQ(rest.at("hidden_states").shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(rest.at("hidden_states").data.get()[5], 8);
}

TEST(OutputTensors, AnEmbeddingOfZerosStaysOne) {
  GenerationConfig config;
  config.pooling = Pooling::kMean;
  const std::shared_ptr<OutputTensors> outputs = *OutputTensors::Create(
      config, {.prompt_length = 2, .num_positions = 2, .hidden_size = 2, .vocab_size = 3});
  EXPECT_TRUE(outputs->WantsWholePrompt());
  for (int64_t position = 0; position < 2; ++position) {
    float* row = outputs->PooledRow(position);
    ASSERT_NE(row, nullptr);
    row[0] = row[1] = 0;
    outputs->Pool(position);
  }
  EXPECT_EQ(outputs->PooledRow(2), nullptr);
  EXPECT_EQ(outputs->Views(0, 2).at("embedding").data.get()[0], 0);
  EXPECT_TRUE(outputs->Views(1, 2).empty());
}

}  // namespace
}  // namespace allspark
