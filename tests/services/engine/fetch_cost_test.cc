#include "services/engine/runtime/fetch_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "services/engine/runtime/link_meter.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::nanoseconds;

nanoseconds Nanos(double seconds) { return duration_cast<nanoseconds>(duration<double>(seconds)); }

// A call that gets chunks over a link as the model of LinkMeter has it.
void Fetch(LinkMeter& meter, FakeClock& clock, int chunks, int64_t bytes, double latency_s, double bytes_per_s,
           LinkMeter::Call::End end = LinkMeter::Call::End::kComplete) {
  LinkMeter::Call call(meter);
  clock.Advance(Nanos(latency_s));
  for (int i = 0; i < chunks; ++i) {
    clock.Advance(Nanos(static_cast<double>(bytes) / bytes_per_s));
    call.Arrived(bytes);
  }
  call.Ended(end);
}

TEST(LinkMeterTest, TellsLatencyFromRate) {
  FakeClock clock;
  LinkMeter meter(clock);
  EXPECT_FALSE(meter.SecondsFor(1).has_value());
  Fetch(meter, clock, 10, 1'000'000, 0.02, 50e6);
  EXPECT_NEAR(meter.estimate().bytes_per_s, 50e6, 50);
  EXPECT_NEAR(meter.estimate().latency_s, 0.02, 1e-6);
  EXPECT_NEAR(*meter.SecondsFor(5'000'000), 0.12, 1e-6);
  const LinkMeter::Expected others(meter, 50'000'000);
  EXPECT_NEAR(*meter.SecondsFor(5'000'000), 1.12, 1e-5);  // behind what others expect
}

TEST(LinkMeterTest, FollowsALinkThatChanges) {
  FakeClock clock;
  LinkMeter meter(clock);
  Fetch(meter, clock, 10, 1'000'000, 0.001, 1000e6);
  for (int i = 0; i < 4; ++i) Fetch(meter, clock, 10, 1'000'000, 0.02, 10e6);
  EXPECT_LT(meter.estimate().bytes_per_s, 80e6);
  EXPECT_GT(meter.estimate().latency_s, 0.015);
  for (int i = 0; i < 4; ++i) Fetch(meter, clock, 10, 1'000'000, 0.001, 1000e6);
  EXPECT_GT(meter.estimate().bytes_per_s, 900e6);
}

// Prompts that are computed before five chunks have come measure nothing else of a link that has become slow.
TEST(LinkMeterTest, LearnsFromFetchesThatWereGivenUp) {
  FakeClock clock;
  LinkMeter meter(clock);
  Fetch(meter, clock, 10, 1'000'000, 0, 1000e6);
  for (int i = 0; i < 8; ++i) Fetch(meter, clock, 1, 1'000'000, 0, 5e6, LinkMeter::Call::End::kUnwanted);
  EXPECT_LT(meter.estimate().bytes_per_s, 12e6);
  // A few chunks that came in time say nothing: they may have been in a buffer.
  Fetch(meter, clock, 3, 1'000'000, 0, 1000e6);
  EXPECT_LT(meter.estimate().bytes_per_s, 12e6);
}

TEST(LinkMeterTest, FewChunksInAllOfTheTimeAreARate) {
  FakeClock clock;
  LinkMeter meter(clock);
  Fetch(meter, clock, 2, 1'000'000, 0, 1e6, LinkMeter::Call::End::kUnwanted);
  EXPECT_FALSE(meter.SecondsFor(1).has_value());  // perhaps it was the latency
  Fetch(meter, clock, 2, 1'000'000, 0, 1e6, LinkMeter::Call::End::kTimeOver);
  EXPECT_NEAR(meter.estimate().bytes_per_s, 1e6, 1);
}

TEST(LinkMeterTest, AStoreThatNeverAnswersIsSlow) {
  FakeClock clock;
  LinkMeter meter(clock);
  Fetch(meter, clock, 0, 0, 2, 1, LinkMeter::Call::End::kTimeOver);
  EXPECT_GE(*meter.SecondsFor(1), 2);
  Fetch(meter, clock, 0, 0, 0.001, 1);  // it has nothing, and says so
  EXPECT_GE(*meter.SecondsFor(1), 2);
}

TEST(LinkMeterTest, CallsSideBySideShareTheLink) {
  FakeClock clock;
  LinkMeter meter(clock);
  LinkMeter::Call a(meter), b(meter);
  for (int i = 0; i < 10; ++i) {
    clock.Advance(Nanos(0.01));
    a.Arrived(1'000'000);
    b.Arrived(1'000'000);
  }
  a.Ended(LinkMeter::Call::End::kComplete);
  b.Ended(LinkMeter::Call::End::kComplete);
  EXPECT_NEAR(meter.estimate().bytes_per_s, 200e6, 15e6);
}

TEST(LinkMeterTest, KnowsHowMuchTheStoreHasOfWhatItIsAskedFor) {
  LinkMeter meter;
  EXPECT_EQ(meter.estimate().found_share, 1);
  meter.NoteFound(0, 0);  // nothing was asked
  EXPECT_EQ(meter.estimate().found_share, 1);
  for (int i = 0; i < 8; ++i) meter.NoteFound(500, 0);
  EXPECT_LT(meter.estimate().found_share, 0.01);
  for (int i = 0; i < 3; ++i) meter.NoteFound(500, 500);
  EXPECT_GT(meter.estimate().found_share, 0.8);
}

TEST(LinkMeterTest, IsMeasuredAgainOncePerAge) {
  FakeClock clock;
  LinkMeter meter(clock);
  Fetch(meter, clock, 10, 1'000'000, 0, 10e6);
  EXPECT_FALSE(meter.TakeProbe(std::chrono::seconds(10)));
  clock.Advance(std::chrono::seconds(10));
  EXPECT_TRUE(meter.TakeProbe(std::chrono::seconds(10)));
  EXPECT_FALSE(meter.TakeProbe(std::chrono::seconds(10)));
}

// A prompt of `num_chunks`, all of them stored, an engine and a link that behave as their models say; what is known of
// the link may be wrong.
struct Case {
  int num_chunks;
  double chunk_s;                    // computing one
  double latency_s, fetch_s;         // of the link: the answer, or the first chunk; each chunk
  std::optional<double> believed_s;  // fetching all of it, as far as the engine knows
  double believed_latency_s;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.num_chunks << " chunks, compute " << c.chunk_s << ", latency " << c.latency_s << ", fetch "
             << c.fetch_s << ", believed " << c.believed_s.value_or(-1) << " and " << c.believed_latency_s;
}

// Time to compute or fetch all of it, as PromptFetcher and PrefillPasses do: passes of `slice` chunks from the front,
// chunks that arrive from the back.
double TimeOverlapped(const Case& c, int slice) {
  const double compute_s = c.num_chunks * c.chunk_s;
  FetchTimes times{.compute_s = compute_s, .fetch_s = c.believed_s};
  const bool worth = IsWorthFetching(times);
  const double hold = worth ? HoldForAnswer(times, c.believed_latency_s) : 0;
  double now = std::min(hold, c.latency_s);
  if (!worth) return now + compute_s;
  const double first = 2 * c.latency_s;  // the answer, then the first chunk
  if (c.latency_s <= hold) {
    double held_until = now + HoldForBytes(times);
    const double all = first + c.num_chunks * c.fetch_s;
    while (held_until > now && now < all) {
      now = std::min(held_until, all);
      const double landed = std::clamp(std::floor((now - first) / c.fetch_s), 0.0, 1.0 * c.num_chunks);
      if (IsOnSchedule(times, now, landed * c.chunk_s)) held_until = now + HoldForBytes(times);
    }
  }
  const double due = c.latency_s + c.believed_s.value_or(0);
  int front = 0;
  while (true) {
    const int landed = std::clamp(static_cast<int>((now - first) / c.fetch_s), 0, c.num_chunks - front);
    if (front + landed >= c.num_chunks) return now;
    const int rows = RowsWhileFetching(due - now, 64 / c.chunk_s, 64 * slice) / 64;
    const int taken = std::min(rows, c.num_chunks - landed - front);
    // While the pass runs chunks go on landing, but never those that it has taken.
    front += taken;
    now += taken * c.chunk_s;
  }
}

TEST(FetchCostTest, NoPromptIsSlowerThanComputingByMoreThanTwoPercent) {
  std::mt19937 random = test::SeededRandom(testing::UnitTest::GetInstance()->current_test_info()->name());
  std::uniform_real_distribution<double> log10(-6, 0);
  const auto any = [&] { return std::pow(10.0, log10(random)); };
  for (int i = 0; i < 20'000; ++i) {
    Case c{.num_chunks = static_cast<int>(1 + random() % 500),
           .chunk_s = any() / 10,
           .latency_s = any(),
           .fetch_s = any(),
           .believed_s = {},
           .believed_latency_s = any()};
    switch (random() % 3) {
      case 0:
        break;  // nothing is known
      case 1:   // the truth
        c.believed_latency_s = c.latency_s;
        c.believed_s = c.latency_s + c.num_chunks * c.fetch_s;
        break;
      default:
        c.believed_s = c.num_chunks * any();
    }
    const double compute_s = c.num_chunks * c.chunk_s;
    EXPECT_LE(TimeOverlapped(c, 8), 1.02 * compute_s + 1e-9) << c;
  }
}

// It must not be won by never fetching.
TEST(FetchCostTest, AFastLinkIsUsed) {
  Case c{.num_chunks = 100,
         .chunk_s = 0.01,
         .latency_s = 1e-4,
         .fetch_s = 1e-3,
         .believed_s = {},
         .believed_latency_s = 0};
  EXPECT_LT(TimeOverlapped(c, 8), 0.2 + 0.08);  // unknown: a slice is computed before
  c.believed_s = 0.1;
  EXPECT_LT(TimeOverlapped(c, 8), 0.13);
  c.believed_s = 2;  // wrong
  EXPECT_GE(TimeOverlapped(c, 8), 1);
}

TEST(FetchCostTest, CopiesAreAwaitedNoLongerThanComputingTakes) {
  std::mt19937 random = test::SeededRandom(testing::UnitTest::GetInstance()->current_test_info()->name());
  std::uniform_real_distribution<double> log10(-4, 2);
  const auto any = [&] { return std::pow(10.0, log10(random)); };
  for (int i = 0; i < 20'000; ++i) {
    FetchTimes times{.compute_s = any(), .queue_s = random() % 2 == 0 ? 0 : any()};
    EXPECT_LE(HoldForCopies(times), 0.25 * times.compute_s);  // nothing is known: a quarter of computing
    times.fetch_s = any();
    const double hold = HoldForCopies(times);
    EXPECT_LE(hold, times.compute_s + times.queue_s);
    EXPECT_LE(hold, 2 * *times.fetch_s + 0.02 * times.compute_s);
    EXPECT_EQ(hold > 0, IsWorthFetching(times));
    // As long as it should take.
    EXPECT_TRUE(!IsWorthFetching(times) || hold >= std::min(*times.fetch_s, times.compute_s));
  }
}

// A store that has never had anything holds nobody back for longer than the promise, however long its answers take.
TEST(FetchCostTest, AStoreThatHasNothingIsHardlyAwaited) {
  std::mt19937 random = test::SeededRandom(testing::UnitTest::GetInstance()->current_test_info()->name());
  std::uniform_real_distribution<double> log10(-4, 2), share(0, 1);
  const auto any = [&] { return std::pow(10.0, log10(random)); };
  for (int i = 0; i < 20'000; ++i) {
    FetchTimes times{.compute_s = any(), .queue_s = random() % 2 == 0 ? 0 : any()};
    if (random() % 2 == 0) times.fetch_s = any();
    const double most = HoldForCopies(times);
    times.found_share = 0;
    const double least = HoldForCopies(times);
    EXPECT_LE(least, kHeldShare * times.compute_s);
    EXPECT_EQ(least > 0, IsWorthFetching(times));
    times.found_share = share(random);
    EXPECT_GE(HoldForCopies(times), least);
    EXPECT_LE(HoldForCopies(times), most);
  }
}

TEST(FetchCostTest, AFullQueueMakesFetchingWorthMore) {
  EXPECT_FALSE(IsWorthFetching({.compute_s = 1, .queue_s = 0, .fetch_s = 1.5}));
  EXPECT_TRUE(IsWorthFetching({.compute_s = 1, .queue_s = 1, .fetch_s = 1.5}));
}

TEST(FetchCostTest, PassesBesideAFetchEndWithIt) {
  EXPECT_EQ(RowsWhileFetching(0, 1000, 512), 512);   // nothing is coming
  EXPECT_EQ(RowsWhileFetching(-1, 1000, 512), 512);  // it is late
  EXPECT_EQ(RowsWhileFetching(0.2, 1000, 512), 192);
  EXPECT_EQ(RowsWhileFetching(0.001, 1000, 512), 64);
  EXPECT_EQ(RowsWhileFetching(9, 1000, 512), 512);
  EXPECT_EQ(RowsWhileFetching(0.001, 1000, 10), 10);  // what others have left of a pass
}

}  // namespace
}  // namespace spl::engine
