#include "services/base/shutdown_signal.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace spl {
namespace {

TEST(ShutdownSignal, WaitReturnsOnSigterm) {
  ShutdownSignal stop;
  kill(getpid(), SIGTERM);
  EXPECT_EQ(stop.Wait(), SIGTERM);
}

TEST(ShutdownSignal, WaitReturnsOnRequest) {
  ShutdownSignal stop(ShutdownSignal::Signals::kNone);
  EXPECT_EQ(stop.WaitFor(std::chrono::milliseconds(1)), -1);
  std::thread requester([&] { stop.RequestStop(); });
  EXPECT_EQ(stop.Wait(), 0);
  EXPECT_EQ(stop.Wait(), 0) << "a stop stays requested";
  requester.join();
}

TEST(ShutdownSignal, SecondInterruptEndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        ShutdownSignal stop;
        kill(getpid(), SIGTERM);
        stop.Wait();
        kill(getpid(), SIGTERM);  // changes nothing
        kill(getpid(), SIGINT);
      },
      ::testing::KilledBySignal(SIGINT), "");
}

TEST(ShutdownSignal, SecondTerminationChangesNothingAfterTheEndEither) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        {
          ShutdownSignal stop;
          kill(getpid(), SIGTERM);
          stop.Wait();
          kill(getpid(), SIGTERM);  // while the program drains
        }
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(ShutdownSignal, RestoresTheMask) {
  { ShutdownSignal stop; }
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGTERM), 0);
}

}  // namespace
}  // namespace spl
