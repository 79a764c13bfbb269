// main of every test program: fault points may be armed; a crash prints its stack; log lines below WARNING only with
// SPLICE_TEST_LOG=info.
#include <gmock/gmock.h>

#include <cstdio>
#include <cstdlib>

#include "services/base/crash_handler.h"
#include "services/base/fault_point.h"
#include "services/base/log.h"

int main(int argc, char** argv) {
  spl::InstallCrashHandler(argv[0]);
  setenv(spl::kEnableFaultsVariable, "1", 1);  // of this program and those that it starts
  const char* const level = std::getenv("SPLICE_TEST_LOG");
  if (const absl::Status status = spl::log::SetLevel(level == nullptr ? "warning" : level); !status.ok()) {
    std::fprintf(stderr, "SPLICE_TEST_LOG: %s\n", status.ToString().c_str());
    return 2;
  }
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
