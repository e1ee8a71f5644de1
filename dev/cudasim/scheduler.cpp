// Blocks, warps and threads. Each OS thread runs one block at a time; each CUDA thread of the block runs on a
// fiber (Boost.Context), a stack of its own that can be left and entered again.
//
// A thread runs until it must wait for others, or ends. Then one of those that can go on is picked: see
// order_threads. A fiber whose thread has ended takes the next thread that has not started: a kernel without
// barriers uses one fiber and never switches. When nobody can go on and not all have ended, the threads that
// wait do so for ever: that is the fault of a missing or divergent barrier, and one of the waiting threads is
// woken to report it from where it stands.
#include <omp.h>
#include <sanitizer/common_interface_defs.h>

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdio>
#include <cstring>
#include <memory>

#include "memory.h"

namespace cudasim {

struct Fiber {
    boost::context::fiber context;  // where it stopped; empty while it runs
    const void* stack_bottom = nullptr;
    size_t stack_bytes = 0;
    void* asan_state = nullptr;
    Thread* thread = nullptr;  // whom it runs; null for the OS thread's own stack
};

namespace {

constexpr size_t stack_bytes = 384 * 1024;  // touched pages alone take memory

// An OS thread that runs blocks. Fibers stay with it, since the compiler may keep addresses of thread_local
// variables across a switch.
struct Worker {
    Fiber own;  // the OS thread's own stack: in run_block
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber*> idle;
    Fiber* current = &own;
    Fiber* left = nullptr;  // the one that was left for the current one

    Block block;
    std::vector<Thread> threads;  // of the block; the first block.threads are in use
    std::vector<Thread*> ready;
    Random random{0};
    bool scattered = false;  // see order_threads
    bool stuck = false;
    bool ending = false;  // fibers shall end
    unsigned votes = 0, votes_at_last_barrier = 0;
};

void end_fibers(Worker& w);

// The worker of this OS thread, until that ends.
Worker& worker() {
    struct Owner {
        Worker worker;
        ~Owner() { end_fibers(worker); }
    };
    thread_local Worker* mine = nullptr;
    if (mine == nullptr) [[unlikely]] {
        thread_local Owner owner;
        mine = &owner.worker;
    }
    return *mine;
}

// ---------------------------------------------------------------------------------------------------
// Fibers

// First thing after a switch: keeps where the other one stopped, and tells ASan which stack this is.
inline void arrived(Worker& w, boost::context::fiber&& came_from) {
    w.left->context = std::move(came_from);
    __sanitizer_finish_switch_fiber(w.current->asan_state, &w.left->stack_bottom, &w.left->stack_bytes);
}

void set_running(Thread* thread) {
    running_thread = thread;
    if (thread != nullptr) threadIdx = thread->index;
}

// Inlined, as what it calls is: the processor guesses where a function returns to, and after a switch it
// guesses wrong for every function on the way back.
[[gnu::always_inline]] inline void switch_to(Worker& w, Fiber& to) {
    w.left = w.current;
    w.current = &to;
    set_running(to.thread);
    __sanitizer_start_switch_fiber(&w.left->asan_state, to.stack_bottom, to.stack_bytes);
    arrived(w, std::move(to.context).resume());
}

void run_threads(Worker& w);

// The last thing a fiber does: back to the OS thread's own stack, never to return.
boost::context::fiber leave_for_good(Worker& w) {
    w.left = w.current;
    w.current = &w.own;
    __sanitizer_start_switch_fiber(nullptr, w.own.stack_bottom, w.own.stack_bytes);
    return std::move(w.own.context);
}

Fiber& idle_fiber(Worker& w) {
    if (w.idle.empty()) {
        Fiber& fiber = *w.fibers.emplace_back(std::make_unique<Fiber>());
        boost::context::protected_fixedsize_stack allocator(stack_bytes);
        const boost::context::stack_context stack = allocator.allocate();
        // Tops of stacks at the same place of their pages would fight for the same few cache lines.
        const size_t stagger = w.fibers.size() % 256 * 320;
        char* const top = static_cast<char*>(stack.sp) - stagger;
        fiber.stack_bottom = static_cast<char*>(stack.sp) - stack.size;
        fiber.stack_bytes = stack.size;
        fiber.context = boost::context::fiber(std::allocator_arg,
                                              boost::context::preallocated(top, stack.size - stagger, stack),
                                              allocator, [&w](boost::context::fiber&& came_from) {
                                                  arrived(w, std::move(came_from));
                                                  run_threads(w);
                                                  return leave_for_good(w);
                                              });
        return fiber;
    }
    Fiber& fiber = *w.idle.back();
    w.idle.pop_back();
    return fiber;
}

// Who runs next. `free` is the calling fiber if its thread has ended, else null.
Fiber& next_fiber(Worker& w, Fiber* free) {
    if (w.ready.empty()) {
        if (w.block.finished == w.block.threads) return w.own;
        w.stuck = true;
        for (Thread& thread : w.threads) {
            if (thread.wait.name != nullptr) return *thread.fiber;
        }
    }
    if (w.scattered) std::swap(w.ready[w.random.below(w.ready.size())], w.ready.back());
    Thread& thread = *w.ready.back();
    w.ready.pop_back();
    if (thread.fiber == nullptr) {
        thread.fiber = free != nullptr ? free : &idle_fiber(w);
        thread.fiber->thread = &thread;
    }
    return *thread.fiber;
}

// The life of a fiber: thread after thread, of block after block, until its worker ends.
void run_threads(Worker& w) {
    Fiber& me = *w.current;
    while (!w.ending) {
        Thread& thread = *me.thread;
        set_running(&thread);
        w.block.launch->thread_body();
        note_hidden_stores();
        thread.finished = true;
        thread.fiber = nullptr;
        ++w.block.finished;
        Fiber& next = next_fiber(w, &me);
        if (&next == &me) continue;
        w.idle.push_back(&me);
        switch_to(w, next);
    }
}

void end_fibers(Worker& w) {
    w.ending = true;
    for (const std::unique_ptr<Fiber>& fiber : w.fibers) {
        fiber->thread = nullptr;
        switch_to(w, *fiber);
    }
}

// ---------------------------------------------------------------------------------------------------
// Waiting

std::string describe(Where where) {
    const char* slash = strrchr(where.file_name(), '/');
    return std::string(slash == nullptr ? where.file_name() : slash + 1) + ":" + std::to_string(where.line());
}

std::string describe(const Thread& thread) {
    char text[200];
    const uint3& i = thread.index;
    if (thread.finished) {
        snprintf(text, sizeof(text), "thread (%u,%u,%u) has ended", i.x, i.y, i.z);
    } else {
        snprintf(text, sizeof(text), "thread (%u,%u,%u) waits at %s, %s", i.x, i.y, i.z, thread.wait.name,
                 describe(thread.wait.where).c_str());
    }
    return text;
}

bool waits_alike(const Wait& a, const Wait& b) {
    return a.name != nullptr && a.act == b.act && a.mask == b.mask;
}

// This thread waits for one that will never come: the first such one is named.
[[noreturn]] void report_stuck(Worker& w, const Thread& thread) {
    const Wait& wait = thread.wait;
    const bool barrier = wait.act == nullptr;
    for (const Thread& other : w.threads) {
        const bool expected =
            barrier || (other.warp() == thread.warp() && (wait.mask >> other.lane() & 1) != 0);
        if (!expected || &other == &thread || waits_alike(other.wait, wait)) continue;
        fault_at(wait.where, "%s%s waits for ever: %s",
                 barrier ? "divergent or missing barrier: " : "absent lane: ", wait.name,
                 describe(other).c_str());
    }
    fault_at(wait.where, "%s waits for ever", wait.name);
}

[[gnu::always_inline]] inline void wait(Worker& w, Thread& thread) {
    Fiber& next = next_fiber(w, nullptr);
    if (&next != w.current) switch_to(w, next);  // itself, where it is the one to report
    if (w.stuck) report_stuck(w, thread);
}

void release(Worker& w, Thread& thread) {
    thread.wait.name = nullptr;
    w.ready.push_back(&thread);
}

Thread& running_for(const char* name, Where where) {
    Thread* thread = running();
    if (thread == nullptr) fault_at(where, "%s outside of a kernel", name);
    note_hidden_stores();
    return *thread;
}

}  // namespace

void barrier(Where where) {
    Thread& thread = running_for("__syncthreads", where);
    Worker& w = worker();
    Block& block = w.block;
    thread.wait = {"__syncthreads", 0, nullptr, nullptr, true, where};
    if (++block.at_barrier < block.threads) return wait(w, thread);

    block.at_barrier = 0;
    ++block.epoch;
    w.votes_at_last_barrier = w.votes;
    w.votes = 0;
    for (Thread& other : w.threads) {
        const Where there = other.wait.where;
        if (there.line() != where.line() || strcmp(there.file_name(), where.file_name()) != 0) {
            fault_at(where, "divergent barriers: %s", describe(other).c_str());
        }
        if (&other != &thread) release(w, other);
    }
    thread.wait.name = nullptr;
}

// Nobody can pass the next barrier before all have read the votes of this one.
unsigned block_count(bool predicate, Where where) {
    Worker& w = worker();
    w.votes += predicate;
    barrier(where);
    return w.votes_at_last_barrier;
}

void warp_collective(const char* name, unsigned mask, void* operands, WarpAct act, Where where,
                     bool orders_memory) {
    Thread& thread = running_for(name, where);
    Worker& w = worker();
    Thread* const lane_0 = &w.threads[thread.warp() * warp_size];
    const unsigned lanes = std::min(warp_size, w.block.threads - thread.warp() * warp_size);
    if ((mask >> thread.lane() & 1) == 0) fault_at(where, "%s: mask %#x lacks the lane itself", name, mask);
    if (lanes < warp_size && mask >> lanes != 0) {
        fault_at(where, "absent lane: %s: mask %#x in a warp of %u threads", name, mask, lanes);
    }
    thread.wait = {name, mask, operands, act, orders_memory, where};
    Warp& warp = w.block.warps[thread.warp()];
    warp.waiting |= 1u << thread.lane();
    if ((warp.waiting & mask) != mask) return wait(w, thread);

    void* all[warp_size] = {};
    for (unsigned i = 0; i < lanes; ++i) {
        if ((mask >> i & 1) == 0) continue;
        const Wait& other = lane_0[i].wait;
        if (!waits_alike(other, thread.wait)) return wait(w, thread);
        all[i] = other.operands;
    }
    act(all, mask);
    if (orders_memory) ++warp.epoch;
    warp.waiting &= ~mask;
    for (unsigned i = 0; i < lanes; ++i) {
        if ((mask >> i & 1) != 0 && i != thread.lane()) release(w, lane_0[i]);
    }
    thread.wait.name = nullptr;
}

// ---------------------------------------------------------------------------------------------------
// Shuffles and votes

namespace {

struct Shuffle {
    uint64_t value, result;
    unsigned source;
};
void act_shuffle(void* const operands[warp_size], unsigned mask) {
    for (unsigned i = 0; i < warp_size; ++i) {
        if ((mask >> i & 1) == 0) continue;
        Shuffle& mine = *static_cast<Shuffle*>(operands[i]);
        mine.result = static_cast<const Shuffle*>(operands[mine.source])->value;
    }
}

struct Vote {
    bool predicate;
    unsigned result;
};
void act_vote(void* const operands[warp_size], unsigned mask) {
    unsigned votes = 0;
    for (unsigned i = 0; i < warp_size; ++i) {
        if ((mask >> i & 1) != 0 && static_cast<const Vote*>(operands[i])->predicate) votes |= 1u << i;
    }
    for (unsigned i = 0; i < warp_size; ++i) {
        if ((mask >> i & 1) != 0) static_cast<Vote*>(operands[i])->result = votes;
    }
}

}  // namespace

uint64_t shuffle(const char* name, unsigned mask, uint64_t value, unsigned source, Where where) {
    if (source >= warp_size || (mask >> source & 1) == 0) {
        fault_at(where, "absent lane: %s reads lane %u, which mask %#x lacks", name, source, mask);
    }
    Shuffle mine = {value, 0, source};
    warp_collective(name, mask, &mine, act_shuffle, where);
    return mine.result;
}

unsigned ballot(const char* name, unsigned mask, bool predicate, Where where) {
    Vote mine = {predicate, 0};
    warp_collective(name, mask, &mine, act_vote, where);
    return mine.result;
}

unsigned lane() { return running() == nullptr ? 0 : running()->lane(); }

void fence() {
    if (running() != nullptr) running()->block->launch->fenced = true;
}

// ---------------------------------------------------------------------------------------------------
// Blocks and grids

namespace {

// Of four blocks, three run warp by warp in a shuffled order, their lanes shuffled too: as one warp goes as
// far as it can before another begins, it outruns the others by as much as barriers allow. In the fourth, any
// thread that can go on may be next: slower, as each switch finds another stack's memory.
void order_threads(Worker& w) {
    w.scattered = w.random.below(4) == 0;
    std::vector<Thread*>& ready = w.ready;
    ready.clear();
    const unsigned warps = static_cast<unsigned>(w.block.warps.size());
    std::vector<unsigned> order(warps);
    for (unsigned i = 0; i < warps; ++i) order[i] = i;
    shuffle_order(order, w.random);
    for (const unsigned warp : order) {
        const size_t start = ready.size();
        const unsigned end = std::min(w.block.threads, (warp + 1) * warp_size);
        for (unsigned i = warp * warp_size; i < end; ++i) {
            ready.push_back(&w.threads[i]);
            std::swap(ready.back(), ready[start + w.random.below(ready.size() - start)]);
        }
    }
}

void run_block(Worker& w, Launch& launch, uint32_t index) {
    blockIdx = {index % launch.grid.x, index / launch.grid.x % launch.grid.y,
                index / launch.grid.x / launch.grid.y};
    blockDim = launch.block;
    gridDim = launch.grid;
    Block& block = w.block;
    block.launch = &launch;
    block.run = launch.first_run + index;
    block.epoch = block.finished = block.at_barrier = 0;
    block.threads = launch.block.x * launch.block.y * launch.block.z;
    block.warps.assign(ceil_div(block.threads, warp_size), Warp{});
    w.random.state = seed() * 0x9e3779b97f4a7c15u + (launch.number << 32) + index;
    w.threads.resize(block.threads);
    for (unsigned i = 0; i < block.threads; ++i) {
        Thread& thread = w.threads[i];
        thread.index = {i % launch.block.x, i / launch.block.x % launch.block.y,
                        i / launch.block.x / launch.block.y};
        thread.block = &block;
        thread.number = i;
        thread.finished = false;
        thread.wait.name = nullptr;
        thread.async_groups.clear();
    }
    order_threads(w);
    begin_shared_memory(launch.shared_bytes);
    switch_to(w, next_fiber(w, nullptr));  // comes back when every thread has ended
}

}  // namespace

void run_kernel(Launch& launch) {
    launch.fenced = launch.has_atomics = false;
    launch.atomics.clear();
    launch.number += uint64_t{1} << 20;  // a graph that runs it again finds another order
    const uint32_t blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    launch.first_run = take_runs(blocks, launch.kernel);
    std::vector<uint32_t> order(blocks);
    for (uint32_t i = 0; i < blocks; ++i) order[i] = i;
    Random random{seed() ^ launch.number << 20};
    shuffle_order(order, random);

    std::atomic<size_t> next{0};
    const auto run_blocks = [&] {
        for (size_t i = next++; i < blocks; i = next++) run_block(worker(), launch, order[i]);
    };
    const int os_threads =
        static_cast<int>(std::min<size_t>(blocks, static_cast<size_t>(omp_get_max_threads())));
    if (os_threads == 1) return run_blocks();
#pragma omp parallel num_threads(os_threads)
    run_blocks();
}

}  // namespace cudasim
