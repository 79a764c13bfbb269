#include "kernels/common/host_buffer.h"

#include <sys/mman.h>

#include "absl/strings/str_cat.h"

namespace spl::kernels {
namespace {

class MappedBuffer final : public Buffer {
 public:
  MappedBuffer(void* data, size_t size, size_t mapped) : data_(data), size_(size), mapped_(mapped) {}
  ~MappedBuffer() override { munmap(data_, mapped_); }
  MappedBuffer(const MappedBuffer&) = delete;
  MappedBuffer& operator=(const MappedBuffer&) = delete;

  void* data() const override { return data_; }
  size_t size() const override { return size_; }

 private:
  void* data_;
  size_t size_, mapped_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Buffer>> AllocateHostBuffer(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t granule = bytes >= kHugePage ? kHugePage : 4096;
  if (bytes > SIZE_MAX - kHugePage) return absl::ResourceExhaustedError("a buffer of more than the address space");
  const size_t mapped = (bytes + granule - 1) / granule * granule + (bytes == 0 ? granule : 0);
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return absl::ResourceExhaustedError(absl::StrCat("no memory for a buffer of ", bytes, " bytes"));
  if (granule == kHugePage) madvise(p, mapped, MADV_HUGEPAGE);  // advice: failure only costs speed
  return std::unique_ptr<Buffer>(std::make_unique<MappedBuffer>(p, bytes, mapped));
}

}  // namespace spl::kernels
