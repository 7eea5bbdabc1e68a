//! Models drawn at random.

use proptest::prelude::*;
use shardwright_core::ModuleId;
use shardwright_partition::Request;

use super::Model;

#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub(crate) request: Request,
}

prop_compose! {
    /// Any tree of up to 30 modules, some sharing parameters, joined, shared by parents, or unused.
    pub(crate) fn any_model()(
        modules in prop::collection::vec((any::<prop::sample::Index>(), 0_u64..1000, any::<bool>(), prop::option::of(0_u64..100)), 1..30),
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
            model.request.modules[module.0 as usize].execution_index = *index;
            if *holds {
                model.parameter(module, "weight", *numel);
            }
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
