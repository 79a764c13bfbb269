#include "services/base/grpc_status.h"

#include <gtest/gtest.h>

#include "services/base/status.h"

namespace spl {
namespace {

TEST(GrpcStatus, EveryCodeCrossesUnchanged) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    const grpc::Status wire = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(wire.error_code()), code);
    EXPECT_EQ(FromGrpcStatus(wire), status);
  }
}

TEST(GrpcDeadline, ConvertsBothWaysAndKeepsInfinity) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto back = FromGrpcDeadline(ToGrpcDeadline(deadline));
  EXPECT_LT(std::chrono::abs(back - deadline), std::chrono::seconds(1));
  EXPECT_EQ(ToGrpcDeadline(std::chrono::steady_clock::time_point::max()), std::chrono::system_clock::time_point::max());
  EXPECT_EQ(FromGrpcDeadline(std::chrono::system_clock::time_point::max()),
            std::chrono::steady_clock::time_point::max());
}

}  // namespace
}  // namespace spl
