# Builds muGPT. `make` builds ./train_gpt for this machine; `make test` runs every test; `make bench` the
# benchmarks. Objects and programs go to build/<backend>/; `make -j` uses every core.
# MARCH=... sets the CPU architecture (default: the one you build on); CXX=clang++ works too.

CXX ?= g++
MARCH ?= native
SANITIZE ?=
, := ,
BACKEND := cpu
BUILD := build/$(BACKEND)$(if $(SANITIZE),-sanitize)

# Kernels reduce in an order that the source fixes; nothing here may let the compiler reorder or assume away
# NaN. -fno-math-errno and -fno-trapping-math change no result. -Wrestrict is off: GCC 12 raises it falsely on
# std::string (GCC bug 105651), as it does -Wmaybe-uninitialized on std::regex in sanitizer builds.
CXXFLAGS ?= -O3 -g1
FLAGS := -std=c++20 -march=$(MARCH) -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast \
         -Wall -Wextra -Wshadow -Wno-restrict -Werror -I. -MMD -MP \
         $(if $(SANITIZE),-fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer \
         -Wno-maybe-uninitialized)

LIBRARY := $(wildcard kernels/*.cpp kernels/$(BACKEND)/*.cpp optim/*.cpp model/*.cpp data/*.cpp cli/*.cpp)
OBJECTS := $(LIBRARY:%.cpp=$(BUILD)/%.o)
TESTS := test_plan test_kernels test_optim test_data test_checkpoint test_cli test_gpt test_program
GTEST := -lgtest -lgtest_main -lpthread

# The commit goes into the log; the header changes, and one file is rebuilt, only when the commit does.
$(shell mkdir -p build; \
    commit=$$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown); \
    line="#define MUGPT_GIT_COMMIT \"$$commit\""; \
    [ "$$(cat build/git_commit.h 2>/dev/null)" = "$$line" ] || echo "$$line" > build/git_commit.h)

.PHONY: all cpu test tests bench clean
.SECONDARY:

all: cpu
cpu: $(BUILD)/train_gpt
	@$(if $(SANITIZE),,ln -sfn $(BUILD)/train_gpt train_gpt)

$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(OBJECTS)
	@echo "link $@"
	@$(CXX) $(CXXFLAGS) $(FLAGS) -o $@ $^ $(LDFLAGS)

# test_gpt drives the program and the model; the others test one room of the house each.
$(BUILD)/test_gpt: $(BUILD)/test_gpt.o $(OBJECTS)
	@echo "link $@"
	@$(CXX) $(CXXFLAGS) $(FLAGS) -o $@ $^ $(GTEST) $(LDFLAGS)
$(BUILD)/test_%: $(BUILD)/dev/test/test_%.o $(OBJECTS)
	@echo "link $@"
	@$(CXX) $(CXXFLAGS) $(FLAGS) -o $@ $^ $(GTEST) $(LDFLAGS)

$(BUILD)/test_program: | $(BUILD)/train_gpt  # which it runs

# OpenBLAS is a yardstick in the benchmarks only; its OpenMP build, by rpath, shares our threads.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-openmp))
$(BUILD)/bench_%: $(BUILD)/dev/bench/bench_%.o $(OBJECTS)
	@echo "link $@"
	@$(CXX) $(CXXFLAGS) $(FLAGS) -o $@ $^ $(if $(OPENBLAS),-L$(OPENBLAS) -Wl$(,)-rpath$(,)$(OPENBLAS) -lopenblas) $(LDFLAGS)
$(BUILD)/dev/bench/%.o: FLAGS += $(if $(OPENBLAS),-DHAVE_OPENBLAS -isystem $(wildcard /usr/include/*/openblas-openmp))

# train_gpt and test_gpt are the same C++ for every backend: the host compiler takes them.
$(BUILD)/%.o: %.cu
	@mkdir -p $(@D)
	@echo "compile $<"
	@$(CXX) $(CXXFLAGS) $(FLAGS) -x c++ -c -o $@ $<
$(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "compile $<"
	@$(CXX) $(CXXFLAGS) $(FLAGS) -c -o $@ $<

tests: cpu $(TESTS:%=$(BUILD)/%)
test:
	scripts/test.sh
bench: $(BUILD)/bench_gemm
	$(BUILD)/bench_gemm

clean:
	rm -rf build train_gpt

-include $(shell find build -name '*.d' 2>/dev/null)
