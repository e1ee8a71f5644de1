# Builds muGPT. `make` builds ./train_gpt for this machine: for its GPU where nvcc and a GPU are there, else for
# its CPU. `make cpu`, `make cuda`, `make sim` choose; `make test` runs every test; `make bench` the benchmarks.
# Objects and programs go to build/<backend>/; `make -j` uses every core.
#
#   MARCH=...     the CPU's architecture (default: the one you build on); "any": programs for every machine of this
#                 kind, in build/cpu-any/, which find out on x86-64 whether there is AVX2 or AVX-512
#   CXX=clang++   another compiler
#   SANITIZE=1    the CPU build under AddressSanitizer and UBSan, in build/cpu-sanitize/
#   ARCHS=...     GPU architectures: "all", or some of 80 86 89 90 100 120 (default: this machine's GPU, else 90)
#   NCCL_HOME=... where NCCL is, if neither with the CUDA toolkit nor in /usr/local or /usr
#   STATIC=1      the CUDA build without shared libraries but libc, the driver and CUDA's, to be copied elsewhere

CXX ?= g++
MARCH ?= native
SANITIZE ?=
ARCHS ?=
STATIC ?=
, := ,
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
GPU := $(if $(NVCC),$(shell nvidia-smi --query-gpu=compute_cap --format=csv$(,)noheader 2>/dev/null | head -n 1))
BACKEND ?= $(if $(GPU),cuda,cpu)
BUILD := build/$(BACKEND)$(if $(SANITIZE),-sanitize)$(and $(filter cpu,$(BACKEND)),$(filter any,$(MARCH)),-any)
# The machine's kind with MARCH=any; and the oldest of that kind, else what was asked for.
kind := $(if $(filter any,$(MARCH)),$(firstword $(subst -, ,$(shell $(CXX) -dumpmachine))))
march := $(patsubst x86_64,x86-64,$(patsubst aarch64,armv8-a,$(or $(kind),$(MARCH))))

# Kernels reduce in an order that the source fixes; nothing here may let the compiler reorder or assume away
# NaN. -fno-math-errno and -fno-trapping-math change no result. Three warnings are off: GCC 12 raises -Wrestrict
# falsely on std::string (GCC bug 105651) and -Wmaybe-uninitialized on std::regex and its own AVX-512 header;
# -Wpsabi is about calls between files that are compiled for different vectors, and no call passes a vector.
CXXFLAGS ?= -O3 -g1
sanitizers := -fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FLAGS := -std=c++20 -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast \
         -Wall -Wextra -Wshadow -Wno-unknown-warning-option -Wno-restrict -Wno-maybe-uninitialized -Wno-psabi -Werror -I. -MMD -MP $(if $(SANITIZE),$(sanitizers))

OPS := $(wildcard kernels/$(BACKEND)/*.cpp)
TESTS := test_plan test_kernels test_optim test_data test_checkpoint test_cli test_data_parallel test_gpt test_program
LIBS := -lxxhash
GTEST := -lgtest -lgtest_main -lpthread

ifeq ($(BACKEND),cpu)
    TESTS += test_math test_dist test_ranks $(if $(kind),test_portable)
endif
ifeq ($(BACKEND),cuda)
    ifeq ($(NVCC),)
        $(error make cuda: nvcc is not there; install the CUDA toolkit, or use `make cpu`)
    endif
    CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
    known := $(shell $(NVCC) --list-gpu-arch | sed 's/compute_//')
    architectures := $(if $(filter all,$(ARCHS)),$(filter $(known),80 86 89 90 100 120),$(or $(ARCHS),$(subst .,,$(GPU)),90))
    newest := $(lastword $(architectures))
    # Relaxed constexpr: constexpr functions of the host, as those of kernels/random.h, are the device's too.
    NVCC_FLAGS := -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr -I. -MMD -MP -Werror all-warnings -Xcompiler -Wall$(,)-Wextra \
                  $(foreach a,$(architectures),-gencode arch=compute_$(a)$(,)code=sm_$(a)) \
                  -gencode arch=compute_$(newest)$(,)code=compute_$(newest)
    # Before NCCL's folders, which may hold another version of CUDA.
    FLAGS += -isystem $(CUDA_HOME)/include
    LIBS += -L$(CUDA_HOME)/lib64 -Wl$(,)-rpath$(,)$(CUDA_HOME)/lib64 -lcublasLt -lcudart
    # NCCL where both its header and its library are, whatever package they came with (PyPI's has no libnccl.so, but
    # libnccl.so.2).
    nccl_library_in = $(and $(wildcard $(1)/include/nccl.h),$(firstword $(sort \
        $(wildcard $(foreach lib,lib lib64 lib/*-linux-gnu,$(1)/$(lib)/libnccl.so*)))))
    HAVE_NCCL := $(firstword $(foreach home,$(or $(NCCL_HOME),$(CUDA_HOME) /usr/local /usr), \
        $(if $(call nccl_library_in,$(home)),$(home))))
    ifneq ($(HAVE_NCCL),)
        nccl_library := $(call nccl_library_in,$(HAVE_NCCL))
        nccl_folder := $(patsubst %/,%,$(dir $(nccl_library)))
        FLAGS += -DMUGPT_HAVE_NCCL $(addprefix -isystem ,$(filter-out /usr/include /usr/local/include,$(HAVE_NCCL)/include))
        LIBS += -L$(nccl_folder) -Wl$(,)-rpath$(,)$(nccl_folder) -l:$(notdir $(nccl_library))
    else ifneq ($(NCCL_HOME),)
        $(error NCCL_HOME=$(NCCL_HOME): has no include/nccl.h, or no lib/libnccl.so)
    endif
    OPS += $(wildcard kernels/cuda/*.cu)
    TESTS += test_instructions test_fused_linear test_cuda
endif
ifeq ($(BACKEND),sim)
    # The simulator sees each load and store of the CUDA sources through the calls that these options make GCC
    # insert; see dev/cudasim/access.cpp.
    CXXFLAGS := -O1 -g1
    instrument := $(sanitizers) --param asan-instrumentation-with-call-threshold=0
    FLAGS += -Idev/cudasim -DMUGPT_CUDASIM -Wno-unknown-pragmas
    OPS := $(wildcard kernels/cuda/*.cu dev/cudasim/*.cpp)
    simulator_tests := test_cudasim test_cublaslt test_nccl
    TESTS += $(simulator_tests) test_instructions test_fused_linear test_cuda test_backends test_simulated_ranks
    LIBS += -fsanitize=address$(,)undefined -lboost_context
endif

# The CPU's programs for any x86-64: the ops are a shared library, built for three levels of the instruction set
# (x86-64 psABI). The C library's loader takes the best that the machine has, from glibc 2.33 on and where the
# folders have these names; else the one beside the program. Calls within a library stay there: the program's copy
# of an inline function knows no AVX.
ifeq ($(BACKEND)$(kind),cpux86_64)
    KERNELS := libmugpt_kernels.so
    FLAGS += -fPIC -fno-semantic-interposition
    LIBS += -Wl$(,)-rpath$(,)'$$ORIGIN'
endif

LINK_FLAGS := $(FLAGS)
ifneq ($(STATIC),)
    LINK_FLAGS := $(filter-out -fopenmp,$(FLAGS)) -static-libstdc++ -static-libgcc
    LIBS := $(patsubst -lcudart,-lcudart_static -lrt -ldl,$(LIBS:-lxxhash=-l:libxxhash.a)) -l:libgomp.a -lpthread
endif

# Between ranks, the data of CPUs goes by TCP, that of GPUs by NCCL where it is installed. Ranks are processes; in
# the simulator threads.
transport_of_cpu := tcp
transport_of_sim := nccl
transport_of_cuda := $(if $(HAVE_NCCL),nccl)
RANKS := dist/transport_$(or $(transport_of_$(BACKEND)),none).cpp dist/launcher$(if $(filter sim,$(BACKEND)),_threads).cpp

LIBRARY := $(wildcard kernels/*.cpp optim/*.cpp model/*.cpp data/*.cpp cli/*.cpp) \
           $(filter-out dist/transport_% dist/launcher%,$(wildcard dist/*.cpp)) $(RANKS) $(if $(KERNELS),,$(OPS))
OBJECTS := $(patsubst %,$(BUILD)/%.o,$(basename $(LIBRARY))) $(KERNELS:%=$(BUILD)/%)

# The commit goes into the log; the header changes, and one file is rebuilt, only when the commit does.
$(shell mkdir -p build; \
    commit=$$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown); \
    line="#define MUGPT_GIT_COMMIT \"$$commit\""; \
    [ "$$(cat build/git_commit.h 2>/dev/null)" = "$$line" ] || echo "$$line" > build/git_commit.h)

.PHONY: all cpu cuda sim program reproduce test tests bench clean
.SECONDARY:

all: $(BACKEND)
cpu cuda sim:
	@$(MAKE) --no-print-directory BACKEND=$@ program
program: $(BUILD)/train_gpt
	@$(if $(filter cpu cpu-any cuda,$(notdir $(BUILD))),ln -sfn $(BUILD)/train_gpt train_gpt)
tests: program $(TESTS:%=$(BUILD)/%)
reproduce: program $(BUILD)/bench_throughput $(BUILD)/bench_plan  # what scripts/reproduce_98.sh runs

LINK = @echo "link $@" && $(CXX) $(CXXFLAGS) $(LINK_FLAGS) -o $@ $^
$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(OBJECTS)
	$(LINK) $(LIBS) $(LDFLAGS)

# test_gpt drives the program and the model; the others test one room of the house each.
$(BUILD)/test_gpt: $(BUILD)/test_gpt.o $(OBJECTS)
	$(LINK) $(GTEST) $(LIBS) $(LDFLAGS)
$(BUILD)/test_%: $(BUILD)/dev/test/test_%.o $(OBJECTS)
	$(LINK) $(GTEST) $(LIBS) $(LDFLAGS)
$(BUILD)/test_program $(BUILD)/test_ranks $(BUILD)/test_portable: | $(BUILD)/train_gpt  # which they run
# The simulator stands alone: its tests link no op.
$(simulator_tests:%=$(BUILD)/%): $(BUILD)/test_%: $(BUILD)/dev/test/test_%.o \
        $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard dev/cudasim/*.cpp)) $(BUILD)/kernels/error.o
	$(LINK) $(GTEST) $(LIBS) $(LDFLAGS)

# OpenBLAS is a yardstick in the benchmarks only; its OpenMP build, by rpath, shares our threads.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-openmp))
LINK_BENCH = $(LINK) $(if $(OPENBLAS),-L$(OPENBLAS) -Wl$(,)-rpath$(,)$(OPENBLAS) -lopenblas) $(LIBS) $(LDFLAGS)
$(BUILD)/bench_%: $(BUILD)/dev/bench/bench_%.o $(OBJECTS)
	$(LINK_BENCH)
$(BUILD)/train_step: $(BUILD)/dev/bench/train_step.o $(OBJECTS)
	$(LINK_BENCH)
$(BUILD)/dev/bench/%.o: FLAGS += $(if $(OPENBLAS),-DHAVE_OPENBLAS -isystem $(wildcard /usr/include/*/openblas-openmp))

# A Muon whose Newton-Schulz is done eight times over: the verdicts of scripts/reproduce_98.sh must notice.
$(BUILD)/handicap/optim/muon.o: FLAGS += -DMUGPT_HANDICAP_MUON=8
$(BUILD)/bench_handicapped: $(BUILD)/dev/bench/bench_throughput.o $(BUILD)/handicap/optim/muon.o \
        $(filter-out $(BUILD)/optim/muon.o,$(OBJECTS))
	$(LINK) $(LIBS) $(LDFLAGS)

# A .cu file is CUDA only below a folder and only for nvcc; to the host compiler it is C++.
COMPILE = @mkdir -p $(@D) && echo "compile $<" && $(CXX) $(CXXFLAGS) -march=$(march) $(FLAGS) $(instrument)
ifeq ($(BACKEND),cuda)
NVCC_COMPILE = @mkdir -p $(@D) && echo "compile $<" && $(NVCC) $(NVCC_FLAGS) -c -o $@ $<
$(BUILD)/kernels/cuda/%.o: kernels/cuda/%.cu
	$(NVCC_COMPILE)
$(BUILD)/dev/test/%.o: dev/test/%.cu
	$(NVCC_COMPILE)
endif
$(BUILD)/%.o: %.cu
	$(COMPILE) -x c++ -c -o $@ $<
$(BUILD)/handicap/%.o: %.cpp
	$(COMPILE) -c -o $@ $<
$(BUILD)/%.o: %.cpp
	$(COMPILE) -c -o $@ $<
ifneq ($(KERNELS),)
ops := $(patsubst %.cpp,%.o,$(OPS))
LINK_KERNELS = $(LINK) -shared -Wl,-Bsymbolic-functions -Wl,-soname,$(KERNELS)
$(BUILD)/$(KERNELS): $(addprefix $(BUILD)/,$(ops)) | $(patsubst %,$(BUILD)/glibc-hwcaps/%/$(KERNELS),x86-64-v3 x86-64-v4)
	$(LINK_KERNELS)
$(BUILD)/glibc-hwcaps/%/$(KERNELS): $(addprefix $(BUILD)/glibc-hwcaps/%/,$(ops))
	$(LINK_KERNELS)
$(BUILD)/glibc-hwcaps/x86-64-v3/%.o: march := x86-64-v3
$(BUILD)/glibc-hwcaps/x86-64-v3/%.o: %.cpp
	$(COMPILE) -c -o $@ $<
$(BUILD)/glibc-hwcaps/x86-64-v4/%.o: march := x86-64-v4
$(BUILD)/glibc-hwcaps/x86-64-v4/%.o: %.cpp
	$(COMPILE) -c -o $@ $<
endif
$(BUILD)/cli/version.o: FLAGS += -DMUGPT_BACKEND='"$(BACKEND)"'
$(BUILD)/dev/cudasim/%.o: instrument :=
$(BUILD)/dev/cudasim/%.o: CXXFLAGS := -O2 -g1
ifeq ($(BACKEND),sim)
# The op suite is host code, its references most of its time: the kernels are checked, it is not (build/cpu-sanitize
# does that). Its guards still poison memory.
$(BUILD)/dev/test/test_kernels.o: instrument := -fsanitize=address --param asan-instrument-reads=0 \
    --param asan-instrument-writes=0 --param asan-stack=0 --param asan-globals=0
$(BUILD)/dev/test/test_kernels.o: CXXFLAGS := -O2 -g1
endif

test:
	scripts/test.sh
bench: $(BUILD)/bench_ops $(BUILD)/bench_gemm $(BUILD)/bench_muon
	$(BUILD)/bench_ops
	$(BUILD)/bench_gemm
	$(BUILD)/bench_muon

clean:
	rm -rf build train_gpt

-include $(shell find build -name '*.d' 2>/dev/null)
