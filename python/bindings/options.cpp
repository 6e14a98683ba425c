// Options of plan and engine, values and reports of steps.
#include "python/bindings/bindings.hpp"
#include "python/bindings/fields.hpp"

namespace tandem::python {
namespace {

void bind_adamw(nb::module_& m) {
  Fields<AdamW>(m, "AdamW", "Hyperparameters of AdamW, without the learning rate.")
      .value("beta1", &AdamW::beta1, "float", "Decay of the first moment, in [0, 1).")
      .value("beta2", &AdamW::beta2, "float", "Decay of the second moment, in [0, 1).")
      .value("eps", &AdamW::eps, "float", "Added to the root of the second moment; above 0.")
      .value("weight_decay", &AdamW::weight_decay, "float", "Decoupled decay, times the learning rate; at least 0.")
      .done();
  Fields<GroupValues>(m, "GroupValues", "Learning rate and hyperparameters of one group of parameters.")
      .value("lr", &GroupValues::lr, "float", "Learning rate.")
      .value("adamw", &GroupValues::adamw, "AdamW | None", "None: those of the options.")
      .done();
}

void bind_offload_options(nb::module_& m) {
  using O = OffloadOptions;
  Fields<O>(m, "OffloadOptions",
            "Memory limits, policy and optimizer of an engine. Bytes are an int or a text such as \"2GiB\".")
      .bytes("device_memory", &O::device_memory,
             "Ceiling in bytes, of context and libraries too. None: what the device was opened with.")
      .bytes("reserved_device_memory", &O::reserved_device_memory, "Bytes of device_memory for the caller's own use.")
      .bytes("host_memory", &O::host_memory, "Ceiling in bytes of pinned and pageable memory. None: no ceiling.")
      .bytes("reserved_host_memory", &O::reserved_host_memory, "Bytes of host_memory for the caller's own use.")
      .bytes("spare_device_memory", &O::spare_device_memory, "Bytes booked beside the plan, for plans to adopt.")
      .bytes("spare_host_memory", &O::spare_host_memory, "Bytes booked under host_memory, for plans to adopt.")
      .value("state_folder", &O::state_folder, "str | os.PathLike[str] | None",
             "Folder on a fast disk for state that host_memory has no room for. None: all is in memory.")
      .text(
          "policy", &O::policy, parse_policy, [](const Policy& p) { return p.text(); },
          "\"auto\", \"device\", \"host\", \"static:R\", \"interleave:K\", \"interleave:K,resident=S\" or \"stream\".")
      .value("subgroup_size", &O::subgroup_size, "int | None", "Parameters in a subgroup. None: chosen.")
      .value("resident_layers", &O::resident_layers, "int | None",
             "Layers whose weights stay on the device. None: as many as fit.")
      .value("prefetch_layers", &O::prefetch_layers, "int | None",
             "Weight buffers for layers that follow each other. None: two where they fit, else one.")
      .value("max_micro_batches", &O::max_micro_batches, "int", "Micro-batches that a step may have.")
      .value("micro_batches_at_once", &O::micro_batches_at_once, "int",
             "Micro-batches that pass through each use of a layer together.")
      .value("owners_make_gradients", &O::owners_make_gradients, "bool",
             "Whether the whole gradient of a tied parameter comes with its owner's.")
      .bytes("offloaded_input_bytes", &O::offloaded_input_bytes,
             "Bytes of a layer's input that the caller sends to the host. For the performance model.")
      .value("update_threads", &O::update_threads, "int | None", "Threads of an update on the CPU. None: all.")
      .text(
          "state", &O::state, state_format_of, [](StateFormat f) { return tandem::name_of(f); },
          "\"fp32\", \"split\", \"bf16-moments\", \"8bit-moments\", or \"lion\", another optimizer.")
      .value("adamw", &O::adamw, "AdamW", "Hyperparameters, where a step gives none.")
      .value("seed", &O::seed, "int", "Seed of stochastic rounding, where the format has any.")
      .text(
          "on_nonfinite", &O::on_nonfinite, on_nonfinite_of, [](OnNonfinite v) { return name_of(v); },
          "\"skip\": a step whose norm is not finite changes nothing. \"stop\": it raises TrainingError.")
      .text(
          "speculate", &O::speculate, speculate_of, [](Speculate v) { return tandem::name_of(v); },
          "\"on\": updates on the CPU run before the gradient norm is known, and are taken back to the bit where it clips or the "
          "step is skipped, and a plan without memory for it does not fit; \"auto\": where there is memory, while most steps are "
          "neither; \"off\".")
      .value("clips", &O::clips, "bool", "Whether steps clip the norm. For the performance model.")
      .value("overlap", &O::overlap, "bool", "False: one task after another.")
      .value("poison_released", &O::poison_released, "bool",
             "For debugging: fills a weight buffer with NaN when its guard goes.")
      .value("watchdog_seconds", &O::watchdog_seconds, "float", "Wait without progress that ends with StalledError.")
      .done();
}

void bind_steps(nb::module_& m) {
  Fields<StepOptions>(m, "StepOptions", "Values of a step.")
      .value("lr", &StepOptions::lr, "float", "Learning rate.")
      .value("max_grad_norm", &StepOptions::max_grad_norm, "float", "Bound of the gradient's norm; 0: no clipping.")
      .value("micro_batches", &StepOptions::micro_batches, "int", "Micro-batches, whose gradients are added up.")
      .value("open_ended", &StepOptions::open_ended, "bool",
             "Whether the step may have fewer micro-batches: it ends with those that have begun.")
      .text(
          "absent", &StepOptions::absent, absent_of, [](Absent v) { return name_of(v); },
          "Layers and parameters without a gradient are \"refuse\"d, count as \"zero\", or, with \"skip\", stay as "
          "they "
          "are, as PyTorch treats a gradient of None.")
      .value("gradient_scale", &StepOptions::gradient_scale, "float", "Factor of the added gradients: 1 / loss scale.")
      .value("adamw", &StepOptions::adamw, "AdamW | None", "None: those of the options.")
      .value("groups", &StepOptions::groups, "list[GroupValues]", "In place of lr and adamw, one for each group.")
      .value("decides_at_end", &StepOptions::decides_at_end, "bool",
             "Whether `skip`, or `update` with other values, may follow end_gradients.")
      .done();
  Fields<UpdateValues>(m, "UpdateValues", "Values by which `update` changes the state.")
      .value("scale", &UpdateValues::scale, "float", "Factor of the added gradients, clipping included.")
      .value("lr", &UpdateValues::lr, "float", "Learning rate of all groups, where `groups` is empty.")
      .value("adamw", &UpdateValues::adamw, "AdamW | None", "None: those of the options.")
      .value("groups", &UpdateValues::groups, "list[GroupValues]", "In place of lr and adamw, one for each group.")
      .done();
  Facts<StepReport>(m, "StepReport", "What a step did.")
      .fact("step", &StepReport::step, "Updates applied so far, this one included unless skipped.")
      .fact("gradient_norm", &StepReport::gradient_norm, "Global norm after gradient_scale, before clipping.")
      .fact("skipped", &StepReport::skipped, "Whether the norm was not finite, so that nothing changed.")
      .fact("exposed_update_seconds", &StepReport::exposed_update_seconds,
            "Seconds that fetches of this step stood still while the update of the one before ran.")
      .done();
}

void bind_counters(nb::module_& m) {
  using C = EngineCounters;
  Facts<LaneSeconds>(m, "LaneSeconds", "Seconds that each kind of work ran, without its waits.")
      .fact("compute", &LaneSeconds::compute, "Seconds of the caller's work between fetch and release.")
      .fact("host_to_device", &LaneSeconds::host_to_device, "Seconds of copies to the device.")
      .fact("device_to_host", &LaneSeconds::device_to_host, "Seconds of copies to the host.")
      .fact("device_update", &LaneSeconds::device_update, "Seconds of the engine's own kernels.")
      .fact("peers", &LaneSeconds::peers, "Seconds of exchanges between ranks.")
      .fact("cpu", &LaneSeconds::cpu, "Seconds of the engine's tasks on the CPU.")
      .fact("file_read", &LaneSeconds::file_read, "Seconds of reading state in a file.")
      .fact("file_write", &LaneSeconds::file_write, "Seconds of writing it.")
      .fact("cpu_update", &LaneSeconds::cpu_update, "Part of `cpu` in updates.")
      .done();
  Facts<C>(m, "EngineCounters", "Totals since the engine was made, counted where the work is executed.")
      .fact("bytes_host_to_device", &C::bytes_host_to_device, "Bytes copied to the device.")
      .fact("bytes_device_to_host", &C::bytes_device_to_host, "Bytes copied to the host.")
      .fact("bytes_from_peers", &C::bytes_from_peers, "Bytes of other ranks.")
      .fact("parameters_updated_cpu", &C::parameters_updated_cpu, "Elements updated on the CPU.")
      .fact("parameters_updated_streamed", &C::parameters_updated_streamed, "Elements streamed through the device.")
      .fact("parameters_updated_resident", &C::parameters_updated_resident, "Elements that live on the device.")
      .fact("parameters_speculated", &C::parameters_speculated,
            "Elements updated before the gradient norm was known, padding counted.")
      .fact("parameters_taken_back", &C::parameters_taken_back, "Those of them that the norm did not confirm.")
      .fact("confirmed_steps", &C::confirmed_steps, "Steps whose updates ran ahead of the norm, and stayed.")
      .fact("rolled_back_steps", &C::rolled_back_steps, "Steps whose updates ran ahead of the norm, and were taken back.")
      .fact("skipped_steps", &C::skipped_steps, "Steps that changed nothing.")
      .fact("dram_bytes", &C::dram_bytes, "Bytes of host memory read or written.")
      .fact("bytes_from_file", &C::bytes_from_file, "Bytes of state read from its file.")
      .fact("bytes_to_file", &C::bytes_to_file, "Bytes of state written to its file.")
      .fact("busy", &C::busy, "Seconds of each kind of work.")
      .fact("update_seconds", &C::update_seconds, "Seconds from the decision to the last update, of all steps.")
      .fact("save_wait_seconds", &C::save_wait_seconds, "Seconds that an update waited for a save.")
      .done();
}

}  // namespace

void bind_options(nb::module_& m) {
  bind_adamw(m);
  bind_offload_options(m);
  bind_steps(m);
  bind_counters(m);
}

}  // namespace tandem::python
