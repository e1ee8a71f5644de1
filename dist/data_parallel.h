// Data parallelism that gives the same bits on any number of ranks.
//
// A step has V leaves (virtual ranks). A leaf is a share of the step's micro-batches; its gradient is the sum
// of theirs, rounded once to the reduce dtype. The leaves' gradients are added in fp32 in the tree of
// kernels/tree.h. Each of R ranks plays V/R neighbouring leaves, a complete subtree, and adds those by
// itself; then each block's R partial sums go to its owner, who adds them in the same tree. Nothing in this
// depends on R: 8 ranks, or one that plays 8 leaves, compute the same sums of the same numbers.
//
// On several nodes with the same power of two of ranks each, a node's ranks are a subtree too. They first add
// among themselves, each of them the blocks of the owners who have its place on their nodes; one sum for each
// block leaves the node. Weights cross to each other node once, and are passed on there.
//
// Owners update their blocks and send the new weights to the others. A stage of the model (gpt_stages) is
// reduced as soon as its backward is done, beside the backward of the stages before it; weights come in
// forward order beside whatever runs then, and are awaited stage by stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dist/comm.h"
#include "kernels/dtype.h"
#include "optim/ownership.h"

struct DataParallelConfig {
    size_t leaves = 1;                 // V
    Dtype reduce_dtype = Dtype::fp32;  // or bf16
    bool overlap = true;               // transfers on a stream of their own
    bool leaf_squares = false;         // for own_leaf_squares
};

// Fails, naming the options, unless `ranks` ranks can play `leaves` leaves: one rank any number, several
// ranks a power of two of them each. What each plays is then a complete subtree.
void data_parallel_check(size_t leaves, int ranks);

// A block, or a part of one, as the exchange sees it.
struct BlockPlace {
    size_t offset, elements;  // in the arenas
    int owner;
    size_t staged;  // where it lies among its owner's blocks of the chunk, in elements
};

// Blocks that are exchanged together.
struct Chunk {
    std::vector<BlockPlace> blocks;
    std::vector<size_t> staged;  // elements of each owner's blocks, gaps included
};

// Ranks of a node, where nodes are such subtrees; all ranks where they are not, or where there is one node.
// nodes: that of each rank.
int subtree_ranks(const std::vector<int>& nodes);

// What is sent when, for any rank: the same on all of them.
struct ExchangePlan {
    int ranks = 1, group = 1;                // the groups are ranks 0 .. group-1, group .. 2 group-1, ...
    size_t wire_bytes = 4;                   // of a gradient's number
    std::vector<std::vector<Chunk>> stages;  // gradients
    std::vector<std::vector<BlockPlace>> weights;  // by stage; neighbours of one owner are one
    // Elements of staging that any chunk needs: of leaves that go and come, and of the groups' sums.
    size_t outgoing = 0, incoming = 0, sums = 0, incoming_sums = 0;
};

// A chunk has at most a layer's numbers, the same share of them for each owner: staging takes twice as much
// as a layer's gradients, once for what goes and once for what comes.
ExchangePlan exchange_plan(const ParameterTable& table, const std::vector<ParameterRange>& stages,
                           const Ownership& ownership, int ranks, int group,
                           const DataParallelConfig& config);

// Bytes that a rank sends in a step, within its group and to others: gradients, and weights of `weight_bytes`
// each.
struct StepBytes {
    uint64_t gradients_within = 0, gradients_between = 0, weights_within = 0, weights_between = 0;

    uint64_t gradients() const { return gradients_within + gradients_between; }
    uint64_t weights() const { return weights_within + weights_between; }
};
StepBytes step_bytes(const ExchangePlan& plan, int rank, size_t weight_bytes);

struct DataParallel {
    Comm* comm = nullptr;
    int rank = 0;
    DataParallelConfig config;
    ExchangePlan plan;
    std::vector<ParameterRange> stages;
    const ParameterTable* table = nullptr;
    size_t own_leaves = 1, first_leaf = 0;
    size_t elements = 0;       // of the gradients' arena
    std::vector<float*> kept;  // sums of leaves that wait for their right neighbour, by level
    void *outgoing = nullptr, *incoming = nullptr;  // staging
    float *sums = nullptr, *incoming_sums = nullptr;
    size_t kept_bytes = 0, staging_bytes = 0;
    double* leaf_squares = nullptr;  // of each own leaf's blocks, where the config asks for them
    Stream *compute = nullptr, *transfers = nullptr;  // one and the same without overlap
    Event *ready = nullptr, *reduced = nullptr;
    std::vector<Event*> gathered;  // by stage
};

// Takes the memory; table and ownership must outlive it. `device` opens the stream of the transfers.
DataParallel data_parallel_create(Comm* comm, const ParameterTable& table,
                                  const std::vector<ParameterRange>& stages, const Ownership& ownership,
                                  const DataParallelConfig& config, const DeviceConfig& device,
                                  Stream* stream);
void data_parallel_destroy(DataParallel& dp);

// After the last micro-batch of own leaf `leaf` but the last: puts its gradients, the arena `grads`, into the
// tree. The arena is free for the next leaf.
void keep_leaf(DataParallel& dp, size_t leaf, float* grads);

// After the backward of stage `stage` in the last micro-batch of the last own leaf: starts its reduction.
void reduce_stage(DataParallel& dp, size_t stage, float* grads);

// From here on the stream's ops see the sums over all leaves in the own blocks of `grads`; others' blocks
// hold this rank's own sums.
void finish_reduction(DataParallel& dp);

// The sum over the own leaves of a step of the squares of each block's gradient, in table order and fp64,
// before they are rounded to the reduce dtype: the leaves are added in their tree. And from all ranks' such
// sums, one after the other, the sums over all leaves: in the same tree, so that they have the same bits on
// any number of ranks.
std::vector<double> own_leaf_squares(const DataParallel& dp);
std::vector<double> sum_leaf_squares(const std::vector<double>& of_ranks, size_t ranks);

// After the update: sends the own blocks' weights and receives the others'.
template <typename Storage>
void gather_weights(DataParallel& dp, Storage* params);

// From here on the stream's ops see the gathered weights of a stage, or of all.
void await_weights(DataParallel& dp, size_t stage);
void await_all_weights(DataParallel& dp);
