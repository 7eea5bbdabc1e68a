//! Models drawn at random.

use proptest::prelude::*;
use shardwright_core::ModuleId;
use shardwright_partition::{ModuleInput, PartitionRequest};

use super::Model;

#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub(crate) request: PartitionRequest,
}

prop_compose! {
    /// Any tree of up to 30 modules, some sharing parameters, joined, shared by parents, or unused;
    /// traced or not, with measured times or not.
    pub(crate) fn any_model()(
        modules in prop::collection::vec((any::<prop::sample::Index>(), 0_u64..1000, any::<bool>(), prop::option::of(0_u64..100)), 1..30),
        measured in prop::collection::vec((0_u32..1000, 0_u64..4000), 30),
        (traced, timed) in (prop::bool::weighted(0.8), any::<bool>()),
        shared in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3),
        joins in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..2),
        parents in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3),
        num_devices in 1_u32..7,
        alpha in prop::sample::select(vec![0.0, 0.2, 0.8, 1.0]),
    ) -> Drawn {
        let mut model = Model::new("Net", num_devices);
        model.request.alpha = alpha;
        for (number, (above, numel, holds, index)) in modules.iter().enumerate() {
            let parent = ModuleId(above.index(number + 1) as u32);
            let module = model.child(parent, &number.to_string(), "Module");
            let input = &mut model.request.modules[module.0 as usize];
            input.execution_index = index.filter(|_| traced);
            input.has_forward = index.is_some();
            if *holds {
                model.parameter(module, "weight", *numel);
            }
        }
        model.request.modules[0].execution_index = traced.then_some(0);
        for (input, (milliseconds, bytes)) in model.request.modules.iter_mut().zip(measured) {
            // What is not executed takes no time and keeps nothing.
            let executed = input.execution_index.is_some();
            let seconds = if executed { f64::from(milliseconds) / 1000.0 } else { 0.0 };
            input.own_seconds = (traced && timed).then_some(seconds);
            input.own_activation_bytes = traced.then_some(if executed { bytes } else { 0 });
        }
        let len = model.request.modules.len();
        let num_parameters = model.request.parameters.len();
        for (module, parameter) in shared {
            if num_parameters > 0 {
                model.share(ModuleId(module.index(len) as u32), parameter.index(num_parameters));
            }
        }
        for (first, second) in joins {
            model.request.joins.push((ModuleId(first.index(len) as u32), ModuleId(second.index(len) as u32)));
        }
        for (module, parent) in parents {
            let (module, parent) = (module.index(len), parent.index(len));
            // A later module as parent would close a cycle with its own ancestors.
            if parent < module {
                model.request.modules[module].parents.push(ModuleId(parent as u32));
            }
        }
        Drawn { request: model.request }
    }
}

/// Modules that are never executed and hold nothing but other modules.
pub(crate) fn containers(request: &PartitionRequest) -> Vec<bool> {
    let mut modules = request.modules.iter();
    let traced = modules.any(|module| module.execution_index.is_some());
    let only_holds = |module: &ModuleInput| {
        let executed = if traced {
            module.execution_index.is_some()
        } else {
            module.has_forward
        };
        !executed && module.parameters.is_empty() && module.buffer_bytes == 0
    };
    request.modules.iter().map(only_holds).collect()
}
