#include "engine/completion_set.h"

#include <gtest/gtest.h>

#include <memory>

#include "cpp/engine/engine_harness.h"
#include "engine/result_queue_impl.h"

namespace allspark::testing {
namespace {

class CompletionSetTest : public ::testing::Test {
 protected:
  std::shared_ptr<ResultQueueImpl> MakeQueue(uint64_t id) {
    return {new ResultQueueImpl(id, 1, {.tokens = 8}, engine_set_), ResultQueueImpl::Delete};
  }

  std::shared_ptr<CompletionSetImpl> engine_set_ = std::make_shared<CompletionSetImpl>();
  std::shared_ptr<CompletionSetImpl> set_ = std::make_shared<CompletionSetImpl>();
};

TEST_F(CompletionSetTest, ReadersWakeWhenAllQueuesOfAStepHaveChanged) {
  const auto a = MakeQueue(1), b = MakeQueue(2);
  set_->Attach(a, /*only_end=*/false);
  set_->Attach(b, /*only_end=*/false);
  CompletionSets unsignalled;
  for (const auto& queue : {a, b}) {
    queue->Append(5, nullptr, 0);
    queue->Announce(unsignalled);
    EXPECT_FALSE(Readable(set_->fd()));
    EXPECT_FALSE(Readable(engine_set_->fd()));
  }
  ASSERT_EQ(unsignalled.size(), 2u);  // each set once, though both of its queues changed
  for (const auto& set : unsignalled) set->Signal();
  EXPECT_TRUE(Readable(set_->fd()));
  EXPECT_TRUE(Readable(engine_set_->fd()));
  EXPECT_EQ(set_->Drain().size(), 2u);
  EXPECT_FALSE(Readable(set_->fd()));
}

TEST_F(CompletionSetTest, ASignalThatComesAfterTheDrainWakesNobody) {
  const auto queue = MakeQueue(1);
  CompletionSets unsignalled;
  queue->Append(5, nullptr, 0);
  queue->Announce(unsignalled);
  EXPECT_EQ(engine_set_->Drain().size(), 1u);
  ASSERT_EQ(unsignalled.size(), 1u);
  unsignalled[0]->Signal();
  EXPECT_FALSE(Readable(engine_set_->fd()));
}

TEST_F(CompletionSetTest, TheEnginesOwnSetHasEachQueueOnce) {
  const auto queue = MakeQueue(1);
  engine_set_->Attach(queue, /*only_end=*/false);
  EXPECT_FALSE(Readable(engine_set_->fd()));
  CompletionSets unsignalled;
  queue->Append(5, nullptr, 0);
  queue->Announce(unsignalled);
  for (const auto& set : unsignalled) set->Signal();
  EXPECT_EQ(engine_set_->Drain().size(), 1u);
  engine_set_->Attach(queue, /*only_end=*/false);  // It has news that nobody read.
  EXPECT_TRUE(Readable(engine_set_->fd()));
  EXPECT_EQ(engine_set_->Drain().size(), 1u);
}

TEST_F(CompletionSetTest, AnEndIsSignalledAtOnce) {
  const auto queue = MakeQueue(1);
  set_->Attach(queue, /*only_end=*/true);
  CompletionSets unsignalled;
  queue->Append(5, nullptr, 0);
  queue->Announce(unsignalled);
  EXPECT_EQ(unsignalled.size(), 1u);  // the engine's alone
  queue->Finish(FinishReason::kLength, "", 0);
  EXPECT_TRUE(Readable(set_->fd()));
}

}  // namespace
}  // namespace allspark::testing
