// A Grappler pass that hands a function's graph to Python and takes a graph back.
//
// Everything that decides anything is in Python. Here are only the registration, a look at the
// names (graphs without gradients must cost next to nothing: no copy, no interpreter lock), and
// the copies across the boundary: of the graph, and of the edges that it had before Grappler merged
// equal ops, which a second pass notes down.

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <string>
#include <unordered_map>

#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/graph/graph.h"
#include "tensorflow/core/grappler/costs/graph_properties.h"
#include "tensorflow/core/grappler/grappler_item.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer_registry.h"

namespace {

// All else is Ctrl-C, which Python may not have had the time to answer.
enum Answer { kUnchanged = 1, kRewritten = 2 };

// graph and its size, a text of names and its size, where to put the answer
using Callback = int (*)(const char*, size_t, const char*, size_t, void*);

std::atomic<Callback> callback{nullptr};

// How many graphs were skipped, and how long the last one took.
std::atomic<long> skips{0};
std::atomic<long> last_skip_nanoseconds{0};

// Whether Python should see the graph: it may compute a gradient (every gradient scope has the word
// in its name), and no decorator has rewritten it or what was inlined into it.
bool ComputesGradient(const tensorflow::GraphDef& graph) {
  const auto any_name_has = [&graph](const char* text) {
    for (const auto& node : graph.node()) {
      if (node.name().find(text) != std::string::npos) return true;
    }
    return false;
  };
  return any_name_has("gradient") && !any_name_has("tfckpt/fence_") && !any_name_has("-tfckpt");
}

bool Skipped(const tensorflow::GraphDef& graph) {
  const auto started = std::chrono::steady_clock::now();
  if (ComputesGradient(graph)) return false;
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - started;
  last_skip_nanoseconds = took.count();
  ++skips;
  return true;
}

// The graph as bytes; empty where it is too large. Where it has loops, with the shapes that Grappler
// infers: an import infers none after a loop.
std::string Serialized(const tensorflow::grappler::GrapplerItem& item) {
  std::string bytes;
  bool any_loop = false;
  for (const auto& node : item.graph.node()) any_loop = any_loop || node.op() == "Enter";
  if (any_loop) {
    tensorflow::grappler::GraphProperties properties(item);
    tensorflow::GraphDef annotated = item.graph;
    if (properties.InferStatically(/*assume_valid_feeds=*/false).ok() &&
        properties.AnnotateOutputShapes(&annotated).ok()) {
      return annotated.SerializeToString(&bytes) ? bytes : "";
    }
  }
  return item.graph.SerializeToString(&bytes) ? bytes : "";
}

// The function that this thread has placed last, and its ops and edges then, a line each.
thread_local std::string placed_function, placed_ops;

std::string Names(const tensorflow::grappler::GrapplerItem& item) {
  std::string text = "id " + item.id + "\n";
  for (const auto& name : item.fetch) text += "fetch " + name + "\n";
  for (const auto& feed : item.feed) text += "feed " + feed.first + "\n";
  for (const auto& name : item.keep_ops) text += "keep " + name + "\n";
  for (const auto& name : item.init_ops) text += "init " + name + "\n";
  if (item.id == placed_function) text += placed_ops;
  return text;
}

}  // namespace

// Null takes the pass out of service; a call under way still ends with the old one.
extern "C" void tfckpt_set_callback(Callback python) { callback = python; }

extern "C" void tfckpt_answer(void* to, const char* bytes, size_t size) {
  static_cast<std::string*>(to)->assign(bytes, size);
}

// The number of graphs that were skipped so far, and the seconds that the last one took.
extern "C" long tfckpt_skips(double* seconds) {
  *seconds = 1e-9 * static_cast<double>(last_skip_nanoseconds);
  return skips;
}

namespace tensorflow {

// Runs before Grappler, in the same thread, on the graph that Grappler is then given.
class TfckptObserver : public GraphOptimizationPass {
 public:
  absl::Status Run(const GraphOptimizationPassOptions& options) override {
    placed_function.clear();
    placed_ops.clear();
    if (callback == nullptr || options.graph == nullptr || options.function_def == nullptr) {
      return absl::OkStatus();
    }
    const Graph& graph = **options.graph;
    bool any_gradient = false;
    std::unordered_map<int, int> number;
    for (const Node* node : graph.op_nodes()) {
      any_gradient = any_gradient || node->name().find("gradient") != std::string::npos;
      number.emplace(node->id(), static_cast<int>(number.size()));
    }
    if (!any_gradient) return absl::OkStatus();
    for (const Node* node : graph.op_nodes()) {
      placed_ops += "placed " + node->name() + " " + node->type_string();
      for (const Edge* edge : node->in_edges()) {
        const auto source = number.find(edge->src()->id());
        if (source == number.end()) continue;  // TensorFlow's own first op
        placed_ops += (edge->IsControlEdge() ? " ^" : " ") + std::to_string(source->second);
      }
      placed_ops += "\n";
    }
    placed_function = options.function_def->signature().name();
    return absl::OkStatus();
  }
};

REGISTER_OPTIMIZATION(OptimizationPassRegistry::POST_PLACEMENT, 0, TfckptObserver);

namespace grappler {

// What stands for a loop while a step is planned; never runs.
REGISTER_OP("TfckptLoop")
    .Input("initial: Tin")
    .Output("final: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type)")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnknownShape);
REGISTER_OP("TfckptWritingLoop")
    .Input("initial: Tin")
    .Output("final: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type)")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnknownShape);

class TfckptOptimizer : public CustomGraphOptimizer {
 public:
  absl::Status Init(const RewriterConfig_CustomGraphOptimizer* config) override {
    if (config != nullptr) {
      for (const auto& parameter : config->parameter_map()) {
        parameters_ += "parameter " + parameter.first + " " + parameter.second.s() + "\n";
      }
    }
    const auto& options = config_proto_.graph_options().rewrite_options();
    rounds_left_ = options.meta_optimizer_iterations() == RewriterConfig::ONE ? 1 : 2;
    return absl::OkStatus();
  }
  std::string name() const override { return "TfckptOptimizer"; }
  bool UsesFunctionLibrary() const override { return true; }

  absl::Status Optimize(Cluster*, const GrapplerItem& item, GraphDef* optimized) override {
    const Callback python = callback;
    // Grappler runs all passes twice. What the second round's passes see must be what they see
    // without us, or the plain function's rounding changes.
    if (--rounds_left_ > 0) return absl::AbortedError("another round follows");
    if (python == nullptr || Skipped(item.graph)) {
      return absl::AbortedError("nothing to do");
    }
    std::string answer;
    const std::string graph = Serialized(item);
    if (graph.empty()) {
      return absl::AbortedError("the graph is larger than a protocol buffer may be");
    }
    const std::string names = Names(item) + parameters_;
    const int said = python(graph.data(), graph.size(), names.data(), names.size(), &answer);
    // Once more, for Python to take when TensorFlow is back there.
    if (said != kUnchanged && said != kRewritten) std::raise(SIGINT);
    if (said != kRewritten || answer.empty()) return absl::AbortedError("left as it was");
    if (!optimized->ParseFromString(answer)) {
      return absl::InternalError("tfckpt: the rewritten graph could not be read");
    }
    return absl::OkStatus();
  }

 private:
  int rounds_left_ = 2;
  std::string parameters_;
};

REGISTER_GRAPH_OPTIMIZER_AS(TfckptOptimizer, "TfckptOptimizer");

}  // namespace grappler
}  // namespace tensorflow
