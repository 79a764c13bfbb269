// Memory of a device, or page-locked memory of the host.
#pragma once

#include <cstddef>

namespace spl::kernels {

// Freed with the object.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual void* data() const = 0;
  virtual size_t size() const = 0;
};

}  // namespace spl::kernels
