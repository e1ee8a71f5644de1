// The tree over leaves and ranks, and the exchange of gradients and weights; see data_parallel.h.
#include "dist/data_parallel.h"

#include <algorithm>
#include <bit>

#include "kernels/error.h"
#include "kernels/kernels.h"
#include "kernels/tree.h"

void data_parallel_check(size_t leaves, int ranks) {
    const auto R = static_cast<size_t>(ranks);
    if (leaves < 1 || leaves > tree_max_parts)
        fail("--virtual-ranks %zu: must be 1 to %u", leaves, tree_max_parts);
    if (R > tree_max_parts) fail("%d ranks: at most %u", ranks, tree_max_parts);
    if (R == 1 || (leaves % R == 0 && std::has_single_bit(leaves / R))) return;
    fail(
        "--virtual-ranks %zu on %d ranks: each rank must play the same power of two of them, so that what it "
        "adds by itself is a part of the one order of additions; %zu, %zu and %zu would do",
        leaves, ranks, R, 2 * R, 4 * R);
}

// ---------------------------------------------------------------------------------------------------
// The plan

namespace {

// The blocks of a stage, each with its owner.
std::vector<BlockPlace> blocks_of(const ParameterTable& table, const GptStage& stage,
                                  const Ownership& ownership) {
    std::vector<BlockPlace> blocks;
    const Parameter* first = &table[stage.first_parameter];
    const Parameter* end = table.data() + stage.end_parameter;
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        if (&parameter < first || &parameter >= end) return;
        blocks.push_back({parameter.offset + block.first_row * parameter.cols, block.rows * parameter.cols,
                          ownership.owner[number], 0});
    });
    return blocks;
}

size_t elements_of(const std::vector<BlockPlace>& blocks) {
    size_t elements = 0;
    for (const BlockPlace& block : blocks) elements += aligned_elements(block.elements);
    return elements;
}

// Chunks of at most `room` elements for each owner, a multiple of 64: a block may be cut, for sums of
// elements do not know where their block ends.
std::vector<Chunk> cut_into_chunks(const std::vector<BlockPlace>& blocks, int ranks, size_t room) {
    std::vector<Chunk> chunks;
    std::vector<size_t> filled(static_cast<size_t>(ranks));  // by each owner, over all chunks
    for (BlockPlace block : blocks) {
        size_t& place = filled[static_cast<size_t>(block.owner)];
        for (size_t left = block.elements; left > 0;) {
            const size_t number = place / room;
            if (number == chunks.size()) chunks.push_back({{}, std::vector<size_t>(filled.size())});
            block.staged = place % room;
            block.elements = std::min(left, room - block.staged);
            chunks[number].blocks.push_back(block);
            chunks[number].staged[static_cast<size_t>(block.owner)] =
                block.staged + aligned_elements(block.elements);
            block.offset += block.elements;
            left -= block.elements;
            place += aligned_elements(block.elements);
        }
    }
    return chunks;
}

// Neighbours of one owner as one block, the gap between them included.
std::vector<BlockPlace> merge_neighbours(const std::vector<BlockPlace>& blocks) {
    std::vector<BlockPlace> merged;
    for (const BlockPlace& block : blocks) {
        if (!merged.empty()) {
            BlockPlace& last = merged.back();
            const bool adjacent = aligned_elements(last.offset + last.elements) == block.offset ||
                                  last.offset + last.elements == block.offset;
            if (adjacent && last.owner == block.owner) {
                last.elements = block.offset + block.elements - last.offset;
                continue;
            }
        }
        merged.push_back(block);
    }
    return merged;
}

}  // namespace

ExchangePlan exchange_plan(const ParameterTable& table, const std::vector<GptStage>& stages,
                           const Ownership& ownership, int ranks, const DataParallelConfig& config) {
    ExchangePlan plan;
    plan.ranks = ranks;
    // A sum of leaves is fp32, on the wire too; a leaf has been rounded.
    const bool leaf_travels = config.leaves == static_cast<size_t>(ranks);
    plan.wire_bytes = leaf_travels ? dtype_size(config.reduce_dtype) : sizeof(float);
    const size_t layer = elements_of(blocks_of(table, stages[1], ownership));
    const size_t room = aligned_elements(layer / static_cast<size_t>(ranks) + 1);
    for (const GptStage& stage : stages) {
        const std::vector<BlockPlace> blocks = blocks_of(table, stage, ownership);
        plan.stages.push_back(cut_into_chunks(blocks, ranks, room));
        plan.weights.push_back(merge_neighbours(blocks));
        for (const Chunk& chunk : plan.stages.back()) {
            const size_t own = chunk.staged[static_cast<size_t>(ownership.rank)];
            plan.outgoing = std::max(plan.outgoing, elements_of(chunk.blocks) - own);
            plan.incoming = std::max(plan.incoming, own * static_cast<size_t>(ranks));
        }
    }
    return plan;
}

StepBytes step_bytes(const ExchangePlan& plan, int rank, size_t weight_bytes) {
    StepBytes bytes;
    for (const std::vector<Chunk>& stage : plan.stages) {
        for (const Chunk& chunk : stage) {
            for (int peer = 0; peer < plan.ranks; peer++) {
                if (peer != rank)
                    bytes.gradients += chunk.staged[static_cast<size_t>(peer)] * plan.wire_bytes;
            }
        }
    }
    for (const std::vector<BlockPlace>& stage : plan.weights) {
        for (const BlockPlace& block : stage) {
            if (block.owner == rank)
                bytes.weights += block.elements * weight_bytes * static_cast<size_t>(plan.ranks - 1);
        }
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------
// Memory and streams

DataParallel data_parallel_create(Comm* comm, const ParameterTable& table,
                                  const std::vector<GptStage>& stages, const Ownership& ownership,
                                  const DataParallelConfig& config, const DeviceConfig& device,
                                  Stream* stream) {
    const int ranks = comm_ranks(comm);
    data_parallel_check(config.leaves, ranks);
    DataParallel dp;
    dp.comm = comm;
    dp.rank = comm_rank(comm);
    dp.config = config;
    dp.table = &table;
    dp.stages = stages;
    dp.elements = table_elements(table);
    dp.own_leaves = config.leaves / static_cast<size_t>(ranks);
    dp.first_leaf = dp.own_leaves * static_cast<size_t>(dp.rank);
    dp.compute = stream;

    dp.kept.resize(static_cast<size_t>(std::bit_width(dp.own_leaves - 1)));
    for (float*& sums : dp.kept) {
        sums = static_cast<float*>(device_malloc(dp.elements * sizeof(float), stream));
        dp.kept_bytes += dp.elements * sizeof(float);
    }
    if (ranks == 1) {
        dp.transfers = stream;
        return dp;
    }
    dp.plan = exchange_plan(table, stages, ownership, ranks, config);
    const auto staging = [&](size_t elements) {
        const size_t bytes = elements * dp.plan.wire_bytes;
        void* memory = device_malloc(bytes, stream);
        device_memset_zero(memory, bytes, stream);  // the gaps between blocks travel too
        dp.staging_bytes += bytes;
        return memory;
    };
    dp.outgoing = staging(dp.plan.outgoing);
    dp.incoming = staging(dp.plan.incoming);
    dp.transfers = config.overlap ? stream_create(device) : stream;
    dp.ready = event_create();
    dp.reduced = event_create();
    for (size_t s = 0; s < stages.size(); s++) {
        dp.gathered.push_back(event_create());
        event_record(dp.gathered.back(), dp.transfers);
    }
    stream_synchronize(stream);
    return dp;
}

void data_parallel_destroy(DataParallel& dp) {
    for (float* sums : dp.kept) device_free(sums, dp.compute);
    device_free(dp.outgoing, dp.compute);
    device_free(dp.incoming, dp.compute);
    if (dp.transfers != dp.compute) stream_destroy(dp.transfers);
    event_destroy(dp.ready);
    event_destroy(dp.reduced);
    for (Event* event : dp.gathered) event_destroy(event);
    dp = {};
}

// ---------------------------------------------------------------------------------------------------
// Gradients

namespace {

void round_leaf(const DataParallel& dp, float* grads, size_t elements, Stream* stream) {
    if (dp.config.reduce_dtype == Dtype::bf16) round_through<bf16_t>(grads, elements, stream);
}

// Sends a chunk's blocks to their owners and adds up the own ones.
template <typename Wire>
void exchange_chunk(DataParallel& dp, const Chunk& chunk, float* grads) {
    const auto ranks = static_cast<size_t>(dp.plan.ranks), rank = static_cast<size_t>(dp.rank);
    Wire *outgoing = static_cast<Wire*>(dp.outgoing), *incoming = static_cast<Wire*>(dp.incoming);
    const size_t own = chunk.staged[rank];

    std::vector<Wire*> to(ranks);  // where each owner's blocks are staged
    std::vector<Transfer> sends, receives;
    for (size_t peer = 0; peer < ranks; peer++) {
        Wire* part = incoming + peer * own;
        to[peer] = peer == rank ? part : outgoing;
        if (peer == rank) continue;
        const size_t staged = chunk.staged[peer];
        if (staged > 0) sends.push_back({static_cast<int>(peer), outgoing, staged * sizeof(Wire)});
        if (own > 0) receives.push_back({static_cast<int>(peer), part, own * sizeof(Wire)});
        outgoing += staged;
    }
    for (const BlockPlace& block : chunk.blocks) {
        cast(to[static_cast<size_t>(block.owner)] + block.staged, grads + block.offset, block.elements,
             dp.transfers);
    }
    comm_exchange(dp.comm, Traffic::gradients, sends, receives, dp.transfers);
    for (const BlockPlace& block : chunk.blocks) {
        if (block.owner != dp.rank) continue;
        tree_sum(grads + block.offset, incoming + block.staged, ranks, own, block.elements, dp.transfers);
    }
}

}  // namespace

void keep_leaf(DataParallel& dp, size_t leaf, float* grads) {
    round_leaf(dp, grads, dp.elements, dp.compute);
    size_t level = 0;
    for (; leaf >> level & 1; level++) add(grads, dp.kept[level], grads, dp.elements, dp.compute);
    copy_on_device(dp.kept[level], grads, dp.elements * sizeof(float), dp.compute);
}

void reduce_stage(DataParallel& dp, size_t stage, float* grads) {
    if (dp.transfers != dp.compute) {
        event_record(dp.ready, dp.compute);
        stream_wait(dp.transfers, dp.ready);
    }
    const size_t first = (*dp.table)[dp.stages[stage].first_parameter].offset;
    const Parameter& last = (*dp.table)[dp.stages[stage].end_parameter - 1];
    const size_t elements = aligned_elements(last.offset + last.size()) - first;
    const size_t leaf = dp.own_leaves - 1;
    const bool leaf_travels = dp.plan.ranks > 1 && dp.own_leaves == 1;
    if (!leaf_travels) round_leaf(dp, grads + first, elements, dp.transfers);
    for (size_t level = 0; level < dp.kept.size(); level++) {
        if (leaf >> level & 1)
            add(grads + first, dp.kept[level] + first, grads + first, elements, dp.transfers);
    }
    if (dp.plan.ranks == 1) return;
    for (const Chunk& chunk : dp.plan.stages[stage]) {
        if (dp.plan.wire_bytes == sizeof(bf16_t)) {
            exchange_chunk<bf16_t>(dp, chunk, grads);
        } else {
            exchange_chunk<float>(dp, chunk, grads);
        }
    }
}

void finish_reduction(DataParallel& dp) {
    if (dp.transfers == dp.compute) return;
    event_record(dp.reduced, dp.transfers);
    stream_wait(dp.compute, dp.reduced);
}

// ---------------------------------------------------------------------------------------------------
// Weights

template <typename Storage>
void gather_weights(DataParallel& dp, Storage* params) {
    if (dp.plan.ranks == 1) return;
    if (dp.transfers != dp.compute) {
        event_record(dp.ready, dp.compute);
        stream_wait(dp.transfers, dp.ready);
    }
    for (size_t stage = 0; stage < dp.stages.size(); stage++) {
        std::vector<Transfer> sends, receives;
        for (const BlockPlace& block : dp.plan.weights[stage]) {
            const size_t bytes = block.elements * sizeof(Storage);
            if (block.owner != dp.rank) {
                receives.push_back({block.owner, params + block.offset, bytes});
                continue;
            }
            for (int peer = 0; peer < dp.plan.ranks; peer++) {
                if (peer != dp.rank) sends.push_back({peer, params + block.offset, bytes});
            }
        }
        comm_exchange(dp.comm, Traffic::weights, sends, receives, dp.transfers);
        event_record(dp.gathered[stage], dp.transfers);
    }
}

void await_weights(DataParallel& dp, size_t stage) {
    if (dp.transfers != dp.compute) stream_wait(dp.compute, dp.gathered[stage]);
}

void await_all_weights(DataParallel& dp) {
    // Stages are gathered in order: with the last, all are there.
    if (!dp.stages.empty()) await_weights(dp, dp.stages.size() - 1);
}

template void gather_weights(DataParallel&, float*);
template void gather_weights(DataParallel&, bf16_t*);
template void gather_weights(DataParallel&, fp16_t*);
