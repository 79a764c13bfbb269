#include "services/grammar/work_budget.h"

#include <malloc.h>

#include <cstdint>
#include <ctime>

namespace spl::grammar {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

thread_local WorkBudget* current = nullptr;

constexpr unsigned kStepsPerLook = 16;         // a step takes 0.1 us to some 10 us: a look at the clock takes 0.03
constexpr std::ptrdiff_t kMaxStack = 4 << 20;  // of the 8 MiB that a thread has

nanoseconds ProcessorTime() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + nanoseconds(now.tv_nsec);
}

const char* StackPointer() { return static_cast<const char*>(__builtin_frame_address(0)); }

// No check may throw into an exception that is under way.
WorkBudget* Checked() { return current != nullptr && std::uncaught_exceptions() == 0 ? current : nullptr; }

}  // namespace

WorkBudget::WorkBudget(const WorkLimits& limits)
    : limits_(limits), start_(steady_clock::now()), start_on_processor_(ProcessorTime()), stack_(StackPointer()) {
  current = this;
}

WorkBudget::~WorkBudget() { End(); }

void WorkBudget::End() { current = nullptr; }

nanoseconds WorkBudget::Spent(nanoseconds exact_above) const {
  const nanoseconds wall = steady_clock::now() - start_;
  return wall <= exact_above ? wall : ProcessorTime() - start_on_processor_;
}

void WorkBudget::Step() {
  if (++steps_ % kStepsPerLook == 0 && Spent(limits_.time) > limits_.time) throw WorkExceeded("time");
}

void WorkBudget::Allocated(size_t bytes) {
  bytes_ += static_cast<std::ptrdiff_t>(bytes);
  if (bytes_ > static_cast<std::ptrdiff_t>(limits_.bytes)) throw WorkExceeded("memory");
  if (stack_ - StackPointer() > kMaxStack) throw WorkExceeded("nesting");
  Step();
}

}  // namespace spl::grammar

// The linker sends the plug-in's calls of X to __wrap_X, and those of __real_X to X (--wrap).
extern "C" {
void* __real__Znwm(size_t size);                 // operator new
void __real__ZdlPv(void* memory);                // operator delete
void __real__ZdlPvm(void* memory, size_t size);  // the same
bool __real__ZN8xgrammar12EarleyParser7AdvanceEhb(void* parser, uint8_t byte, bool print);

void* __wrap__Znwm(size_t size) {
  if (spl::grammar::WorkBudget* const budget = spl::grammar::Checked()) budget->Allocated(size);
  return __real__Znwm(size);
}

void __wrap__ZdlPv(void* memory) {
  if (spl::grammar::current != nullptr) spl::grammar::current->Freed(malloc_usable_size(memory));
  __real__ZdlPv(memory);
}

void __wrap__ZdlPvm(void* memory, size_t size) {
  if (spl::grammar::current != nullptr) spl::grammar::current->Freed(size);
  __real__ZdlPvm(memory, size);
}

bool __wrap__ZN8xgrammar12EarleyParser7AdvanceEhb(void* parser, uint8_t byte, bool print) {
  if (spl::grammar::WorkBudget* const budget = spl::grammar::Checked()) budget->Step();
  return __real__ZN8xgrammar12EarleyParser7AdvanceEhb(parser, byte, print);
}
}
