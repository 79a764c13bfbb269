// Memory that this process may use, from files as /proc and /sys/fs/cgroup have them.
#include "kernels/common/host_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/backend/backend.h"
#include "tests/support/temp_dir.h"

namespace spl::kernels {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class HostMemoryTest : public ::testing::Test {
 protected:
  HostMemoryTest() { Write("proc/meminfo", "MemTotal:       8192000 kB\nMemFree: 1 kB\nMemAvailable:   4096000 kB\n"); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = std::filesystem::path(dir_.path()) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  // A group with a limit and what it uses, of which `inactive` are file pages that the kernel can drop.
  void WriteGroup(const std::string& folder, const std::string& limit, uint64_t used, uint64_t inactive) {
    Write(folder + "/memory.max", limit + "\n");
    Write(folder + "/memory.current", std::to_string(used) + "\n");
    Write(folder + "/memory.stat", "anon 1\ninactive_file " + std::to_string(inactive) + "\n");
  }
  HostMemory Read() {
    const absl::StatusOr<HostMemory> memory = ReadHostMemory(dir_.path());
    EXPECT_TRUE(memory.ok()) << memory.status();
    return memory.value_or(HostMemory{});
  }

  testing::TempDir dir_;
};

TEST_F(HostMemoryTest, WithoutGroupsItIsTheMachines) {
  EXPECT_EQ(Read().total_bytes, 8'192'000ull << 10);
  EXPECT_EQ(Read().available_bytes, 4'096'000ull << 10);
  EXPECT_EQ(Read().limited_by, "");
  Write("proc/self/cgroup", "0::/a\n");  // a group that sets no limit
  WriteGroup("sys/fs/cgroup/a", "max", 5, 0);
  EXPECT_EQ(Read().available_bytes, 4'096'000ull << 10);
}

TEST_F(HostMemoryTest, ALimitOfVersion2LeavesWhatIsNotUsed) {
  Write("proc/self/cgroup", "0::/a/b\n");
  WriteGroup("sys/fs/cgroup/a/b", std::to_string(1000 * kMiB), 400 * kMiB, 100 * kMiB);
  EXPECT_EQ(Read().available_bytes, 700 * kMiB);
  EXPECT_EQ(Read().total_bytes, 1000 * kMiB);
  EXPECT_EQ(Read().limited_by, dir_.path() + "/sys/fs/cgroup/a/b");
  WriteGroup("sys/fs/cgroup/a", std::to_string(500 * kMiB), 450 * kMiB, 0);  // the group above has less
  EXPECT_EQ(Read().available_bytes, 50 * kMiB);
  EXPECT_EQ(Read().limited_by, dir_.path() + "/sys/fs/cgroup/a");
  WriteGroup("sys/fs/cgroup/a", std::to_string(500 * kMiB), 600 * kMiB, 0);  // the limit was lowered
  EXPECT_EQ(Read().available_bytes, 0u);
}

// In a container the path is that of the host, and the mount is the container's own group.
TEST_F(HostMemoryTest, AGroupWhosePathIsNotThereIsTheMount) {
  Write("proc/self/cgroup", "0::/kubepods/pod1/c1\n");
  WriteGroup("sys/fs/cgroup", std::to_string(2000 * kMiB), 500 * kMiB, 0);
  EXPECT_EQ(Read().available_bytes, 1500 * kMiB);
}

TEST_F(HostMemoryTest, Version1) {
  Write("proc/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/docker/c\n1:name=systemd:/y\n");
  Write("sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes", std::to_string(300 * kMiB));
  Write("sys/fs/cgroup/memory/docker/c/memory.usage_in_bytes", std::to_string(250 * kMiB));
  Write("sys/fs/cgroup/memory/docker/c/memory.stat",
        "inactive_file 1\ntotal_inactive_file " + std::to_string(50 * kMiB) + "\n");
  EXPECT_EQ(Read().available_bytes, 100 * kMiB);
  Write("sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes", "9223372036854771712\n");  // version 1's "max"
  EXPECT_EQ(Read().available_bytes, 4'096'000ull << 10);
}

TEST_F(HostMemoryTest, WithoutMeminfoNothingIsKnown) {
  Write("proc/meminfo", "MemTotal: 5 kB\n");
  EXPECT_EQ(ReadHostMemory(dir_.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadHostMemory(dir_.path() + "/none").status().code(), absl::StatusCode::kNotFound);
}

TEST(CpuBackendMemoryTest, IsThatOfThisMachine) {
  const absl::StatusOr<DeviceMemory> memory = MakeCpuBackend()->Memory();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GT(memory->free_bytes, 0u);
  EXPECT_GE(memory->total_bytes, memory->free_bytes);
}

}  // namespace
}  // namespace spl::kernels
