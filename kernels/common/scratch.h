// Scratch memory of one thread: grows to the largest request and is then reused, so that steady state allocates nothing.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace spl::kernels {

class Scratch {
 public:
  // 64-byte aligned, contents undefined, valid until the next call on this object.
  float* Floats(size_t count) { return static_cast<float*>(Bytes(count * sizeof(float))); }

  void* Bytes(size_t bytes) {
    if (bytes > size_) {
      const size_t rounded = (bytes + bytes / 2 + 63) / 64 * 64;
      data_.reset(std::aligned_alloc(64, rounded));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

}  // namespace spl::kernels
