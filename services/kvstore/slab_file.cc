#include "services/kvstore/slab_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <span>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/chunk/chunk_header.h"

namespace spl::kvstore {
namespace {

FaultPoint write_fault("kvstore.slab.write");
FaultPoint read_fault("kvstore.slab.read");
FaultPoint grow_fault("kvstore.slab.grow");

constexpr char kMagic[] = {'S', 'P', 'L', 'S', 'L', 'A', 'B', '1'};
constexpr uint32_t kVersion = 1;

struct SlabHeader {  // little-endian; the hosts Splice runs on are
  char magic[8];
  uint32_t version;
  uint32_t crc32c;  // checksum of the header with this field 0
  uint64_t slot_bytes;
};
static_assert(sizeof(SlabHeader) == 24 && std::endian::native == std::endian::little);

uint32_t CrcOf(SlabHeader header) {
  header.crc32c = 0;
  return kernels::Crc32cExtend(0, &header, sizeof(header));
}

struct FreeDeleter {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte, FreeDeleter>;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment; }

AlignedBytes MakeAligned(uint64_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(kSlabAlignment, bytes)));
}

absl::Status DiskError(const std::string& path, const char* what) {
  const int error = errno;
  const auto code =
      error == ENOSPC || error == EDQUOT ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable;
  return Errorf(code, "{}: {}: {}", path, what, std::strerror(error));
}

// The whole range or an error; a file that ends early is an error as well.
absl::Status WriteAll(int fd, const std::string& path, const std::byte* bytes, uint64_t size, uint64_t offset) {
  while (size > 0) {
    const ssize_t written = pwrite(fd, bytes, size, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return DiskError(path, "write");
    bytes += written;
    offset += static_cast<uint64_t>(written);
    size -= static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ReadUpTo(int fd, const std::string& path, std::byte* bytes, uint64_t size, uint64_t offset) {
  uint64_t total = 0;
  while (total < size) {
    const ssize_t got = pread(fd, bytes + total, size - total, static_cast<off_t>(offset + total));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return DiskError(path, "read");
    if (got == 0) break;
    total += static_cast<uint64_t>(got);
  }
  return total;
}

}  // namespace

uint64_t PaddedBytes(uint64_t payload_bytes) { return AlignUp(chunk::kEncodedHeaderBytes + payload_bytes); }

uint64_t SlotBytesFor(uint64_t payload_bytes) {
  const uint64_t needed = PaddedBytes(payload_bytes);
  const uint64_t step = std::max<uint64_t>(std::bit_floor(needed) / 8, kSlabAlignment);
  return (needed + step - 1) / step * step;
}

absl::StatusOr<std::unique_ptr<SlabFile>> SlabFile::Open(const std::string& path, uint64_t slot_bytes) {
  auto file = std::unique_ptr<SlabFile>(new SlabFile(path, slot_bytes));
  SPLICE_RETURN_IF_ERROR(file->OpenFile());
  return file;
}

SlabFile::~SlabFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SlabFile::OpenFile() {
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  fd_ = open(path_.c_str(), flags | O_DIRECT, 0644);
  direct_ = fd_ >= 0;
  if (fd_ < 0 && errno == EINVAL) fd_ = open(path_.c_str(), flags, 0644);  // tmpfs and the like
  if (fd_ < 0) return DiskError(path_, "open");
  struct stat info;
  if (fstat(fd_, &info) != 0) return DiskError(path_, "stat");
  if (info.st_size == 0) return WriteHeader();
  SPLICE_RETURN_IF_ERROR(ReadHeader());
  num_slots_ = (static_cast<uint64_t>(info.st_size) - kSlabAlignment) / slot_bytes_;
  return absl::OkStatus();
}

absl::Status SlabFile::WriteHeader() {
  SlabHeader header{{}, kVersion, 0, slot_bytes_};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.crc32c = CrcOf(header);
  const AlignedBytes block = MakeAligned(kSlabAlignment);
  std::memset(block.get(), 0, kSlabAlignment);
  std::memcpy(block.get(), &header, sizeof(header));
  SPLICE_RETURN_IF_ERROR(WriteAll(fd_, path_, block.get(), kSlabAlignment, 0));
  return Sync();
}

absl::Status SlabFile::ReadHeader() {
  const AlignedBytes block = MakeAligned(kSlabAlignment);
  SPLICE_ASSIGN_OR_RETURN(const uint64_t got, ReadUpTo(fd_, path_, block.get(), kSlabAlignment, 0));
  SlabHeader header;
  std::memcpy(&header, block.get(), sizeof(header));
  if (got < kSlabAlignment || std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      header.crc32c != CrcOf(header)) {
    return Errorf(absl::StatusCode::kDataLoss, "{} is not a slab file or its header is damaged", path_);
  }
  if (header.version != kVersion) {
    return Errorf(absl::StatusCode::kFailedPrecondition, "{} has format version {}, this program reads {}", path_,
                  header.version, kVersion);
  }
  if (header.slot_bytes == slot_bytes_) return absl::OkStatus();
  return Errorf(absl::StatusCode::kDataLoss, "{} has slots of {} bytes, its name says {}", path_, header.slot_bytes,
                slot_bytes_);
}

absl::Status SlabFile::Grow(uint64_t num_slots) {
  const off_t from = static_cast<off_t>(OffsetOf(num_slots_));
  const off_t length = static_cast<off_t>(num_slots * slot_bytes_);
  if (grow_fault.armed()) SPLICE_RETURN_IF_ERROR(grow_fault.Hit().status);
  if (fallocate(fd_, 0, from, length) != 0) {
    if (errno != EOPNOTSUPP) {
      const absl::Status status = DiskError(path_, "allocate");
      // A file system may keep the blocks that it had found before it ran out. If this fails, nothing else is lost.
      [[maybe_unused]] const int ignored = ftruncate(fd_, from);
      return status;
    }
    if (ftruncate(fd_, from + length) != 0) return DiskError(path_, "grow");
  }
  num_slots_ += num_slots;
  return absl::OkStatus();
}

absl::Status SlabFile::Write(uint64_t slot, std::span<const std::byte> bytes) {
  if (write_fault.armed()) {
    const FaultOutcome fault = write_fault.Hit();
    SPLICE_RETURN_IF_ERROR(fault.status);
    if (fault.drop) return absl::OkStatus();
    if (fault.corrupt) {
      const AlignedBytes damaged = MakeAligned(bytes.size());
      std::memcpy(damaged.get(), bytes.data(), bytes.size());
      damaged.get()[chunk::kEncodedHeaderBytes] ^= std::byte(1);
      return WriteAll(fd_, path_, damaged.get(), bytes.size(), OffsetOf(slot));
    }
  }
  return WriteAll(fd_, path_, bytes.data(), bytes.size(), OffsetOf(slot));
}

absl::StatusOr<chunk::ChunkHeader> SlabFile::Read(uint64_t slot, std::span<std::byte> buffer) const {
  if (read_fault.armed()) SPLICE_RETURN_IF_ERROR(read_fault.Hit().status);
  SPLICE_ASSIGN_OR_RETURN(const uint64_t got, ReadUpTo(fd_, path_, buffer.data(), buffer.size(), OffsetOf(slot)));
  SPLICE_ASSIGN_OR_RETURN(const chunk::ChunkHeader header, chunk::DecodeHeader({buffer.data(), got}));
  if (header.payload_bytes > got - chunk::kEncodedHeaderBytes) {
    return Errorf(absl::StatusCode::kDataLoss, "{} slot {}: the payload does not fit the slot", path_, slot);
  }
  SPLICE_RETURN_IF_ERROR(
      chunk::VerifyPayload(header, {buffer.data() + chunk::kEncodedHeaderBytes, header.payload_bytes}));
  return header;
}

absl::Status SlabFile::Sync() {
  if (fdatasync(fd_) != 0) return DiskError(path_, "sync");
  return absl::OkStatus();
}

absl::Status SlabFile::Punch(uint64_t slot) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (fallocate(fd_, mode, static_cast<off_t>(OffsetOf(slot)), static_cast<off_t>(slot_bytes_)) == 0 ||
      errno == EOPNOTSUPP) {
    return absl::OkStatus();
  }
  return DiskError(path_, "punch");
}

}  // namespace spl::kvstore
