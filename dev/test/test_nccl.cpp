// The simulator's NCCL: each call against its definition, under every order of streams; and planted faults,
// each of which must be reported rather than hang or pass.
#include <gtest/gtest.h>

#include <nccl.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "kernels/dtype.h"

namespace {

constexpr int ranks = 3;

// One rank: a host thread with its device, its streams and its communicator.
struct Rank {
    int rank = 0;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr, compute = nullptr;
    cudaEvent_t event = nullptr;

    size_t index() const { return static_cast<size_t>(rank); }
    int next() const { return (rank + 1) % ranks; }
    int previous() const { return (rank + ranks - 1) % ranks; }
};

// Runs `f` as each of the ranks. `f` may end the communicator itself and set it to null.
void run_ranks(const std::function<void(Rank&)>& f) {
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([=, &f] {
            Rank r;
            r.rank = rank;
            ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
            cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking);
            cudaStreamCreateWithFlags(&r.compute, cudaStreamNonBlocking);
            cudaEventCreateWithFlags(&r.event, cudaEventDisableTiming);
            ASSERT_EQ(ncclCommInitRank(&r.comm, ranks, id, rank), ncclSuccess);
            f(r);
            cudaStreamSynchronize(r.stream);
            EXPECT_EQ(ncclCommDestroy(r.comm), ncclSuccess);
            cudaStreamDestroy(r.stream), cudaStreamDestroy(r.compute), cudaEventDestroy(r.event);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// As above, under every kind of order.
void run_ranks_over_seeds(const std::function<void(Rank&)>& f) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        cudasim::set_seed(seed);
        run_ranks(f);
    }
}

template <typename Element>
struct DeviceArray {
    Element* memory = nullptr;
    size_t n;

    explicit DeviceArray(size_t n_) : n(n_) {
        EXPECT_EQ(cudaMalloc(&memory, n * sizeof(Element)), cudaSuccess);
    }
    explicit DeviceArray(const std::vector<Element>& host) : DeviceArray(host.size()) {
        cudaMemcpy(memory, host.data(), n * sizeof(Element), cudaMemcpyHostToDevice);
    }
    ~DeviceArray() { cudaFree(memory); }
    DeviceArray(const DeviceArray&) = delete;

    std::vector<Element> to_host() const {
        std::vector<Element> host(n);
        cudaMemcpy(host.data(), memory, n * sizeof(Element), cudaMemcpyDeviceToHost);
        return host;
    }
};

// Rank r's numbers: their sum depends on the order in which it is taken, and its rounding.
std::vector<double> numbers(int rank, size_t n) {
    constexpr double large[ranks] = {1000, 0.125, -1000};
    std::vector<double> result(n);
    for (size_t i = 0; i < n; ++i) result[i] = large[rank] + static_cast<double>(i % 7) * (rank + 1) * 0.25;
    return result;
}

template <typename Element>
Element from_double(double x) {
    if constexpr (std::is_arithmetic_v<Element>) {
        return static_cast<Element>(x);
    } else {
        return from_float<Element>(static_cast<float>(x));
    }
}
template <typename Element>
double to_double(Element x) {
    if constexpr (std::is_arithmetic_v<Element>) {
        return static_cast<double>(x);
    } else {
        return to_float(x);
    }
}

template <typename Element>
std::vector<Element> numbers_as(int rank, size_t n) {
    std::vector<Element> result;
    for (const double x : numbers(rank, n)) result.push_back(from_double<Element>(x));
    return result;
}

// ((rank 0 + rank 1) + rank 2), each sum rounded.
template <typename Element>
std::vector<Element> sum_in_rank_order(size_t n) {
    std::vector<Element> sums = numbers_as<Element>(0, n);
    for (int rank = 1; rank < ranks; ++rank) {
        const std::vector<Element> terms = numbers_as<Element>(rank, n);
        for (size_t i = 0; i < n; ++i)
            sums[i] = from_double<Element>(to_double(sums[i]) + to_double(terms[i]));
    }
    return sums;
}

template <typename Element>
bool same_bits(const std::vector<Element>& a, const std::vector<Element>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(Element)) == 0;
}

__global__ void copy_kernel(float* out, const float* in, size_t n) {
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i];
}

void copy_on(cudaStream_t stream, float* out, const float* in, size_t n) {
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>((n + 31) / 32);
    config.blockDim = 32;
    config.stream = stream;
    EXPECT_EQ(cudaLaunchKernelEx(&config, copy_kernel, out, in, n), cudaSuccess);
}

class Nccl : public testing::Test {
protected:
    static void SetUpTestSuite() { setenv("CUDASIM_DEVICES", "3", 1); }
    void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
    void TearDown() override {
        cudaDeviceSynchronize();
        const char* seed = getenv("CUDASIM_SEED");
        cudasim::set_seed(seed == nullptr ? 0 : strtoull(seed, nullptr, 10));
    }
};
using NcclDeathTest = Nccl;

// ---------------------------------------------------------------------------------------------------
// What the calls do

template <typename Element>
void check_all_reduce(ncclDataType_t type) {
    const size_t n = 37;
    run_ranks_over_seeds([&](Rank& r) {
        const std::vector<Element> mine = numbers_as<Element>(r.rank, n);
        const DeviceArray<Element> send(mine), receive(n), in_place(mine);
        ncclAllReduce(send.memory, receive.memory, n, type, ncclSum, r.comm, r.stream);
        ncclAllReduce(in_place.memory, in_place.memory, n, type, ncclSum, r.comm, r.stream);
        cudaStreamSynchronize(r.stream);
        EXPECT_TRUE(same_bits(receive.to_host(), sum_in_rank_order<Element>(n))) << "type " << type;
        EXPECT_TRUE(same_bits(in_place.to_host(), sum_in_rank_order<Element>(n))) << "type " << type;
        EXPECT_TRUE(same_bits(send.to_host(), mine)) << "type " << type;
    });
}

TEST_F(Nccl, AllReduceAddsInRankOrder) {
    check_all_reduce<float>(ncclFloat32);
    check_all_reduce<double>(ncclFloat64);
    check_all_reduce<bf16_t>(ncclBfloat16);
    check_all_reduce<fp16_t>(ncclFloat16);
    check_all_reduce<int32_t>(ncclInt32);
    check_all_reduce<int64_t>(ncclInt64);
}

TEST_F(Nccl, OtherReductions) {
    run_ranks([](Rank& r) {
        const DeviceArray<int32_t> x(std::vector<int32_t>{r.rank + 2, -r.rank}), y(2);
        const auto reduced = [&](ncclRedOp_t op) {
            ncclAllReduce(x.memory, y.memory, 2, ncclInt32, op, r.comm, r.stream);
            cudaStreamSynchronize(r.stream);
            return y.to_host();
        };
        EXPECT_EQ(reduced(ncclMax), (std::vector<int32_t>{4, 0}));
        EXPECT_EQ(reduced(ncclMin), (std::vector<int32_t>{2, -2}));
        EXPECT_EQ(reduced(ncclProd), (std::vector<int32_t>{24, 0}));
    });
}

TEST_F(Nccl, ReduceScatterAndAllGather) {
    const size_t n = 5;  // of each rank
    run_ranks_over_seeds([&](Rank& r) {
        const std::vector<float> mine = numbers_as<float>(r.rank, n * ranks),
                                 sums = sum_in_rank_order<float>(n * ranks);
        const auto own_block = [&](const std::vector<float>& all) {
            return std::vector<float>(all.begin() + r.rank * int{n}, all.begin() + (r.rank + 1) * int{n});
        };
        const DeviceArray<float> send(mine), part(n), whole(n * ranks), in_place(mine);
        float* const own = in_place.memory + r.index() * n;
        ncclReduceScatter(send.memory, part.memory, n, ncclFloat32, ncclSum, r.comm, r.stream);
        ncclAllGather(part.memory, whole.memory, n, ncclFloat32, r.comm, r.stream);
        ncclReduceScatter(in_place.memory, own, n, ncclFloat32, ncclSum, r.comm, r.stream);
        cudaStreamSynchronize(r.stream);
        EXPECT_EQ(part.to_host(), own_block(sums));
        EXPECT_EQ(whole.to_host(), sums);
        EXPECT_EQ(own_block(in_place.to_host()), own_block(sums));
        ncclAllGather(own, in_place.memory, n, ncclFloat32, r.comm, r.stream);
        cudaStreamSynchronize(r.stream);
        EXPECT_EQ(in_place.to_host(), sums);
    });
}

TEST_F(Nccl, Broadcast) {
    run_ranks_over_seeds([](Rank& r) {
        const DeviceArray<float> x(numbers_as<float>(r.rank, 9)), y(9);
        ncclBroadcast(x.memory, y.memory, 9, ncclFloat32, 1, r.comm, r.stream);
        ncclBroadcast(x.memory, x.memory, 9, ncclFloat32, 2, r.comm, r.stream);
        cudaStreamSynchronize(r.stream);
        EXPECT_EQ(y.to_host(), numbers_as<float>(1, 9));
        EXPECT_EQ(x.to_host(), numbers_as<float>(2, 9));
    });
}

// All-to-all as the trainer sends gradients to their owners: each rank's block goes to each other, its own
// too.
TEST_F(Nccl, GroupedSendsAndReceives) {
    run_ranks_over_seeds([](Rank& r) {
        std::vector<float> blocks, expected;
        for (int peer = 0; peer < ranks; ++peer) {
            blocks.push_back(static_cast<float>(10 * r.rank + peer));
            expected.push_back(static_cast<float>(10 * peer + r.rank));
        }
        const DeviceArray<float> send(blocks), receive(ranks);
        ncclGroupStart();
        for (int peer = 0; peer < ranks; ++peer) {
            ncclSend(send.memory + peer, 1, ncclFloat32, peer, r.comm, r.stream);
            ncclRecv(receive.memory + peer, 1, ncclFloat32, peer, r.comm, r.stream);
        }
        ncclGroupEnd();
        cudaStreamSynchronize(r.stream);
        EXPECT_EQ(receive.to_host(), expected);
    });
}

// Transfers of one group proceed one by one: here 0's second can only begin when its first has arrived. And a
// rank's n-th send to a peer meets that peer's n-th receive.
TEST_F(Nccl, TransfersOfAGroupDoNotWaitForEachOther) {
    run_ranks_over_seeds([](Rank& r) {
        const DeviceArray<float> x(std::vector<float>{float(r.rank), float(r.rank) + 0.5f}), y(2);
        if (r.rank == 0) {
            ncclGroupStart();
            ncclSend(x.memory, 1, ncclFloat32, 1, r.comm, r.stream);
            ncclSend(x.memory + 1, 1, ncclFloat32, 2, r.comm, r.stream);
            ncclGroupEnd();
        } else if (r.rank == 1) {
            ncclRecv(y.memory, 1, ncclFloat32, 0, r.comm, r.stream);
            ncclSend(x.memory, 1, ncclFloat32, 2, r.comm, r.stream);
            ncclSend(x.memory + 1, 1, ncclFloat32, 2, r.comm, r.stream);
        } else {
            ncclRecv(y.memory, 1, ncclFloat32, 1, r.comm, r.stream);
            ncclRecv(y.memory + 1, 1, ncclFloat32, 1, r.comm, r.stream);
            ncclRecv(x.memory, 1, ncclFloat32, 0, r.comm, r.stream);
        }
        cudaStreamSynchronize(r.stream);
        if (r.rank == 2) {
            EXPECT_EQ(y.to_host(), (std::vector<float>{1.0f, 1.5f}));
            EXPECT_EQ(x.to_host()[0], 0.5f);
        }
    });
}

// Collectives and host code of ranks that are far apart: a rank may wait, free memory and go on while others
// have not called yet.
TEST_F(Nccl, RanksRunApart) {
    run_ranks_over_seeds([](Rank& r) {
        for (int step = 0; step < 20; ++step) {
            std::this_thread::sleep_for(std::chrono::microseconds(r.rank * 300));
            const DeviceArray<float> x(std::vector<float>(4, static_cast<float>(step))), y(4);
            copy_on(r.compute, y.memory, x.memory, 4);
            cudaEventRecord(r.event, r.compute);
            cudaStreamWaitEvent(r.stream, r.event);
            ncclAllReduce(y.memory, y.memory, 4, ncclFloat32, ncclSum, r.comm, r.stream);
            cudaEventRecord(r.event, r.stream);
            cudaStreamWaitEvent(r.compute, r.event);
            copy_on(r.compute, x.memory, y.memory, 4);
            cudaStreamSynchronize(r.compute);
            EXPECT_EQ(x.to_host()[3], static_cast<float>(ranks * step));
            cudaDeviceSynchronize();
        }
    });
}

TEST_F(Nccl, RefusalsAndErrorTexts) {
    run_ranks([](Rank& r) {
        const DeviceArray<float> x(std::vector<float>(4, 1.0f));
        EXPECT_EQ(ncclBroadcast(x.memory, x.memory, 4, ncclFloat32, ranks, r.comm, r.stream),
                  ncclInvalidArgument);
        EXPECT_EQ(ncclSend(x.memory, 4, ncclFloat32, -1, r.comm, r.stream), ncclInvalidArgument);
        EXPECT_EQ(
            ncclAllReduce(x.memory, x.memory, 4, static_cast<ncclDataType_t>(77), ncclSum, r.comm, r.stream),
            ncclInvalidArgument);
        EXPECT_EQ(
            ncclAllReduce(x.memory, x.memory, 4, ncclFloat32, static_cast<ncclRedOp_t>(4), r.comm, r.stream),
            ncclInvalidArgument);
    });
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    ncclComm_t comm = nullptr;
    ncclUniqueId id = {};
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 0), ncclInvalidArgument);  // an id of nobody
    ncclGetUniqueId(&id);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
    EXPECT_STREQ(ncclGetErrorString(ncclRemoteError), "remote process exited or there was a network error");
}

// ---------------------------------------------------------------------------------------------------
// Ranks that do not agree, or do not come

struct Collective {
    enum { all_reduce, broadcast } kind = all_reduce;
    size_t count = 4;
    ncclDataType_t type = ncclFloat32;
    ncclRedOp_t op = ncclSum;
    int root = 0;
};

// All ranks call ncclAllReduce or ncclBroadcast; rank 2 as `odd` says.
void call_unlike(Collective usual, Collective odd) {
    run_ranks([&](Rank& r) {
        const Collective& c = r.rank == 2 ? odd : usual;
        const DeviceArray<double> x(std::vector<double>(8, 1.0));
        if (c.kind == Collective::all_reduce) {
            ncclAllReduce(x.memory, x.memory, c.count, c.type, c.op, r.comm, r.stream);
        } else {
            ncclBroadcast(x.memory, x.memory, c.count, c.type, c.root, r.comm, r.stream);
        }
        cudaStreamSynchronize(r.stream);
    });
}

TEST_F(NcclDeathTest, RanksThatDisagree) {
    const Collective usual, broadcast = {.kind = Collective::broadcast};
    call_unlike(usual, usual);
    call_unlike(broadcast, broadcast);
    EXPECT_DEATH(
        call_unlike(usual, {.count = 5}),
        "ranks disagree: rank . calls ncclAllReduce of [45] float32, sum, rank . ncclAllReduce of [45]");
    EXPECT_DEATH(call_unlike(usual, {.type = ncclInt32}), "ranks disagree: .*ncclAllReduce of 4 int32");
    EXPECT_DEATH(call_unlike(usual, {.op = ncclMax}),
                 "ranks disagree: .*ncclAllReduce of 4 float32, maximum");
    EXPECT_DEATH(call_unlike(usual, broadcast), "ranks disagree: .*ncclBroadcast of 4 float32 from rank 0");
    EXPECT_DEATH(call_unlike(broadcast, {.kind = Collective::broadcast, .root = 1}),
                 "ranks disagree: .*ncclBroadcast of 4 float32 from rank 1");
}

TEST_F(NcclDeathTest, SendsThatReceivesDoNotMatch) {
    const auto send_around = [](size_t sent, size_t received, ncclDataType_t received_type) {
        run_ranks([&](Rank& r) {
            const DeviceArray<float> x(std::vector<float>(8, 1.0f)), y(8);
            ncclGroupStart();
            ncclSend(x.memory, sent, ncclFloat32, r.next(), r.comm, r.stream);
            ncclRecv(y.memory, received, received_type, r.previous(), r.comm, r.stream);
            ncclGroupEnd();
        });
    };
    send_around(8, 8, ncclFloat32);
    EXPECT_DEATH(send_around(8, 7, ncclFloat32), "ranks disagree: .*nccl(Send|Recv) of [87] float32");
    EXPECT_DEATH(send_around(8, 8, ncclInt32), "ranks disagree: .*ncclRecv of 8 int32");
}

TEST_F(NcclDeathTest, RanksThatNeverCome) {
    cudasim::set_timeout(0.5);
    const auto all_but = [](int absent, auto call) {
        run_ranks([&](Rank& r) {
            const DeviceArray<float> x(std::vector<float>(8, 1.0f));
            if (r.rank != absent) call(r, x.memory);
        });
    };
    const auto reduce = [](Rank& r, float* x) {
        ncclAllReduce(x, x, 8, ncclFloat32, ncclSum, r.comm, r.stream);
        cudaStreamSynchronize(r.stream);
    };
    all_but(-1, reduce);
    EXPECT_DEATH((cudasim::set_timeout(0.5), all_but(1, reduce)),
                 "ncclAllReduce waits for ever: rank 1 has not called it");
    EXPECT_DEATH((cudasim::set_timeout(0.5), all_but(2,
                                                     [](Rank& r, float* x) {
                                                         if (r.rank == 0) {
                                                             ncclRecv(x, 1, ncclFloat32, 2, r.comm, r.stream);
                                                         }
                                                     })),
                 "ncclSend/ncclRecv waits for ever: rank 2 .ncclSend. has not called it");
    // Ungrouped, all ranks wait in their send.
    EXPECT_DEATH(
        (cudasim::set_timeout(0.5), all_but(-1,
                                            [](Rank& r, float* x) {
                                                ncclSend(x, 1, ncclFloat32, r.next(), r.comm, r.stream);
                                                ncclRecv(x, 1, ncclFloat32, r.previous(), r.comm, r.stream);
                                            })),
        "waits for ever: rank . .nccl(Send|Recv). has called it, but its stream does not come to it");
    EXPECT_DEATH(
        {
            cudasim::set_timeout(0.5);
            ncclUniqueId id;
            ncclGetUniqueId(&id);
            ncclComm_t comm;
            ncclCommInitRank(&comm, 2, id, 0);
        },
        "ncclCommInitRank waits for ever: rank 1 has not called it");
    cudasim::set_timeout(60);
}

TEST_F(NcclDeathTest, Communicators) {
    const auto init_two = [](int second_device, int second_rank, int second_ranks) {
        ncclUniqueId id;
        ncclGetUniqueId(&id);
        const auto init = [&](int device, int rank, int n) {
            ncclComm_t comm;
            cudaSetDevice(device);
            ncclCommInitRank(&comm, n, id, rank);
            ncclCommDestroy(comm);
        };
        std::thread other(init, second_device, second_rank, second_ranks);
        init(0, 0, 2);
        other.join();
    };
    init_two(1, 1, 2);
    EXPECT_DEATH(init_two(0, 1, 2), "ranks [01] and [01] on device 0");
    EXPECT_DEATH(init_two(1, 0, 2), "rank 0 has called it before");
    EXPECT_DEATH(init_two(1, 1, 3), "ranks disagree: ncclCommInitRank for [23] ranks and for [23]");
    EXPECT_DEATH(run_ranks([](Rank& r) {
                     const DeviceArray<float> x(std::vector<float>(8, 1.0f));
                     ncclAllReduce(x.memory, x.memory, 8, ncclFloat32, ncclSum, r.comm, r.stream);
                     ncclCommDestroy(r.comm);
                 }),
                 "ncclCommDestroy: ncclAllReduce is still on its way");
    EXPECT_DEATH(run_ranks([](Rank& r) {
                     const DeviceArray<float> x(std::vector<float>(8, 1.0f));
                     cudaSetDevice(0);
                     ncclAllReduce(x.memory, x.memory, 8, ncclFloat32, ncclSum, r.comm, r.stream);
                     cudaStreamSynchronize(r.stream);
                 }),
                 "ncclAllReduce on a stream of device [12] while device 0 is current");
}

// Rank 2 never calls. The others look for a while, then give up, and can go on to end in order.
TEST_F(Nccl, AbortEndsWhatIsOnItsWay) {
    run_ranks_over_seeds([](Rank& r) {
        const DeviceArray<float> x(std::vector<float>(8, 1.0f));
        if (r.rank != 2) {
            ncclAllReduce(x.memory, x.memory, 8, ncclFloat32, ncclSum, r.comm, r.stream);
            for (int look = 0; look < 20; ++look) {
                EXPECT_EQ(cudaStreamQuery(r.stream), cudaErrorNotReady);
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        } else {
            ncclResult_t error = ncclSuccess;
            while (error == ncclSuccess) EXPECT_EQ(ncclCommGetAsyncError(r.comm, &error), ncclSuccess);
            EXPECT_EQ(error, ncclRemoteError);
            EXPECT_EQ(ncclAllReduce(x.memory, x.memory, 8, ncclFloat32, ncclSum, r.comm, r.stream),
                      ncclRemoteError);
        }
        EXPECT_EQ(ncclCommAbort(std::exchange(r.comm, nullptr)), ncclSuccess);
        EXPECT_EQ(cudaStreamSynchronize(r.stream), cudaSuccess);
        EXPECT_EQ(x.to_host(), std::vector<float>(8, 1.0f));
    });
}

// ---------------------------------------------------------------------------------------------------
// Memory

TEST_F(NcclDeathTest, Memory) {
    const auto gather = [](size_t receive_size, size_t sent, size_t shift) {
        run_ranks([&](Rank& r) {
            const DeviceArray<float> x(8), y(receive_size);
            cudaMemset(x.memory, 0, sent * sizeof(float));
            cudaDeviceSynchronize();
            float* const send = shift == 0 ? x.memory : y.memory + r.index() * 8 + shift - 1;
            ncclAllGather(send, y.memory, 8, ncclFloat32, r.comm, r.stream);
        });
    };
    gather(24, 8, 0);
    EXPECT_DEATH(gather(23, 8, 0), "ncclAllGather: out of bounds from byte 92 of 96");
    EXPECT_DEATH(gather(24, 7, 0), "ncclAllGather: reads memory that was never written, from byte 28 of 32");
    EXPECT_DEATH(gather(25, 8, 2), "ncclAllGather: send and receive memory overlap");
}

// A sum is used on another stream, and the memory that was sent is written again: after the event, or not.
enum class Forgotten { nothing, wait_before_use, wait_before_reuse };
void use_and_reuse(Forgotten forgotten) {
    run_ranks([=](Rank& r) {
        const DeviceArray<float> gradient(std::vector<float>(32, 1.0f)), next(std::vector<float>(32, 100.0f)),
            sum(std::vector<float>(32, -1.0f)), used(32);
        ncclAllReduce(gradient.memory, sum.memory, 32, ncclFloat32, ncclSum, r.comm, r.stream);
        cudaEventRecord(r.event, r.stream);
        if (forgotten == Forgotten::wait_before_use) copy_on(r.compute, used.memory, sum.memory, 32);
        if (forgotten == Forgotten::wait_before_reuse) copy_on(r.compute, gradient.memory, next.memory, 32);
        cudaStreamWaitEvent(r.compute, r.event);
        copy_on(r.compute, used.memory, sum.memory, 32);
        copy_on(r.compute, gradient.memory, next.memory, 32);
        cudaStreamSynchronize(r.compute);
        EXPECT_EQ(used.to_host(), std::vector<float>(32, float{ranks}));
    });
}

TEST_F(NcclDeathTest, ForgottenEventWaits) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        cudasim::set_seed(seed);
        use_and_reuse(Forgotten::nothing);
        EXPECT_DEATH(
            use_and_reuse(Forgotten::wait_before_use),
            "race between streams: (writes what kernel copy_kernel read|reads what ncclAllReduce wrote)");
        EXPECT_DEATH(
            use_and_reuse(Forgotten::wait_before_reuse),
            "race between streams: (reads what kernel copy_kernel wrote|writes what ncclAllReduce read)");
    }
}

}  // namespace
