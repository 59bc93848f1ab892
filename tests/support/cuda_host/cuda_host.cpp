// Runs a kernel on the host: every lane of a warp is a fiber, and a shuffle is where it waits for the others.
//
// Fibers are made once with ucontext and changed with _setjmp and _longjmp, which make no system call. One
// launch at a time: the caller holds a lock.

#include "cuda_host.hpp"

#include <csetjmp>
#include <cstdio>
#include <memory>
#include <ucontext.h>
#include <utility>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

using Word = unsigned long long;

const unsigned LANES = 32;
const std::size_t STACK_BYTES = 256 * 1024;
const unsigned RUNNING = 0;  // not in a collective call
const unsigned MOST_ARGUMENTS = 24;

struct Fiber {
    ucontext_t start;
    std::jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool started = false, done = false;
    unsigned waits_in = RUNNING;
    unsigned parity = 0;
};

Fiber fibers[LANES];
std::jmp_buf scheduler;
ucontext_t unused;
unsigned slots[2][LANES];  // in turns: a lane may give its next value before the others have read this one

void (*kernel)();
const Word* arguments;
unsigned argument_count;
cuda_host::Access* trace;  // null: accesses are not written down
std::size_t trace_room, trace_count;
char message[256];
bool failed;

template <std::size_t... I>
void call_with(std::index_sequence<I...>) {
    reinterpret_cast<void (*)(decltype((void)I, Word())...)>(kernel)(arguments[I]...);
}

template <std::size_t Count = 0>
void call_kernel() {
    if (argument_count == Count) return call_with(std::make_index_sequence<Count>());
    if constexpr (Count < MOST_ARGUMENTS) return call_kernel<Count + 1>();
    std::snprintf(message, sizeof message, "no kernel takes %u arguments", argument_count);
    failed = true;
}

// Frames below the jump are left as they are: each side has a stack of its own.
__attribute__((noinline)) void change(std::jmp_buf& from, std::jmp_buf& to) {
    if (_setjmp(from) == 0) _longjmp(to, 1);
}

Fiber& current() { return fibers[threadIdx.x % LANES]; }

void live() {
    for (;;) {
        call_kernel();
        Fiber& self = current();
        self.done = true;
        change(self.place, scheduler);
    }
}

void resume(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, live, 0);
    swapcontext(&unused, &fiber.start);
}

[[noreturn]] void fail() {
    failed = true;
    for (;;) change(current().place, scheduler);
}

// All lanes run to their next collective call or to the end, in turns.
void run_warp(unsigned warp) {
    for (Fiber& fiber : fibers) fiber.done = false, fiber.parity = 0, fiber.waits_in = RUNNING;
    for (;;) {
        unsigned done = 0;
        for (unsigned lane = 0; lane < LANES; ++lane) {
            threadIdx.x = warp * LANES + lane;
            resume(fibers[lane]);
            if (failed) return;
            done += fibers[lane].done;
        }
        if (done == LANES) return;
        for (unsigned lane = 1; lane < LANES && !failed; ++lane) {
            if (fibers[lane].done != fibers[0].done || fibers[lane].waits_in != fibers[0].waits_in) {
                std::snprintf(message, sizeof message,
                              "lanes 0 and %u of CTA %u, warp %u wait in different calls", lane, blockIdx.x,
                              warp);
                failed = true;
            }
        }
        if (failed) return;
    }
}

}  // namespace

namespace cuda_host {

// Gives a value, waits until all lanes have given theirs, and returns them.
static const unsigned* meet(unsigned mask, unsigned value, unsigned call) {
    Fiber& self = current();
    if (mask != 0xFFFFFFFFu) {
        std::snprintf(message, sizeof message, "a call for lanes %08x; all 32 are expected", mask);
        fail();
    }
    const unsigned turn = self.parity;
    self.parity ^= 1;
    slots[turn][this_lane()] = value;
    self.waits_in = call;
    change(self.place, scheduler);
    self.waits_in = RUNNING;
    return slots[turn];
}

unsigned exchange(unsigned mask, unsigned value, unsigned lane, unsigned call) {
    return meet(mask, value, call)[lane];
}

bool all(unsigned mask, bool value) {
    const unsigned* given = meet(mask, value, 1000);
    for (unsigned lane = 0; lane < LANES; ++lane) {
        if (!given[lane]) return false;
    }
    return true;
}

void check_access(const volatile void* address, std::size_t size, const char* what) {
    const Word at = reinterpret_cast<std::uintptr_t>(address);
    if (trace) {
        if (trace_count < trace_room) {
            const Word thread = (Word)blockIdx.x * blockDim.x + threadIdx.x;
            trace[trace_count] = {at, size, thread / LANES, thread % LANES,
                                  what[0] == 'a' ? 2u : what[0] == 's'};
        }
        ++trace_count;
    }
    if (at % size) {
        std::snprintf(message, sizeof message, "%s of %zu bytes at an address that is no multiple of it",
                      what, size);
        fail();
    }
}

}  // namespace cuda_host

// Runs CTAs first to last - 1 of a grid; returns null, or what went wrong. `flush`: fp32 subnormals count as
// zero, as under -ftz=true.
extern "C" const char* lowshard_run(void (*function)(), const Word* words, unsigned count, unsigned grid,
                                    unsigned threads, unsigned first, unsigned last, int flush) {
    kernel = function, arguments = words, argument_count = count;
    failed = false;
    gridDim = {grid, 1, 1}, blockDim = {threads, 1, 1};
#if defined(__SSE__)
    const unsigned before = _mm_getcsr();
    if (flush) _mm_setcsr(before | 0x8040);  // results and operands
#else
    (void)flush;
#endif
    for (unsigned cta = first; cta < last && !failed; ++cta) {
        blockIdx = {cta, 0, 0};
        for (unsigned warp = 0; warp < threads / LANES && !failed; ++warp) run_warp(warp);
    }
#if defined(__SSE__)
    _mm_setcsr(before);
#endif
    if (!failed) return nullptr;
    for (Fiber& fiber : fibers) fiber.started = false;  // some stand in the middle of the kernel
    return message;
}

// Writes down the accesses of later launches in order, as many as there is room for; null ends it. Returns how many
// there were since the call before.
extern "C" std::size_t lowshard_trace(cuda_host::Access* accesses, std::size_t room) {
    const std::size_t found = trace_count;
    trace = accesses, trace_room = room, trace_count = 0;
    return found;
}
