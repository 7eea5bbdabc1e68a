//! `TorchContext`: what only PyTorch means of a call.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use shardwright_wire::{Checkpointing, Collecting, SettingValue};

use crate::values::Spec;

/// The torch state that a module runs under.
#[pyclass(frozen, eq, module = "shardwright._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct TorchContext(pub(crate) shardwright_wire::TorchContext);

#[pymethods]
impl TorchContext {
    /// `autocast` has for each device type under autocast its name, the dtype's and whether casts are cached; `hooks`
    /// is False where only the module's `forward` runs; `device` and `settings` are what the task has changed of the
    /// script's; `collector` is what `transformers` collects: for lists how long they are, else the value.
    /// `checkpointing` is as its attribute has it.
    ///
    /// Raises `ValueError` for a setting whose value is of another kind.
    #[new]
    #[pyo3(signature = (*, grad_mode, inference_mode=false, autocast=Vec::new(), checkpointing=None, hooks=true,
                        device=None, settings=Vec::new(), collector=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords, in Python")]
    fn new(
        grad_mode: bool,
        inference_mode: bool,
        autocast: Vec<(String, String, bool)>,
        checkpointing: Option<(bool, bool, u32)>,
        hooks: bool,
        device: Option<String>,
        settings: Vec<(TorchSetting, Setting)>,
        collector: Option<Vec<(String, Collected)>>,
    ) -> PyResult<Self> {
        let settings = settings.into_iter().map(|(setting, value)| {
            let setting = setting.to_wire();
            let value = SettingValue::from(value);
            if setting.takes(&value) {
                return Ok((setting, value));
            }
            let name = setting.name();
            Err(PyValueError::new_err(format!("{name} is set to {value:?}")))
        });
        let collector = collector.map(|entries| {
            let entries = entries.into_iter();
            entries.map(|(name, entry)| (name, entry.into())).collect()
        });
        Ok(Self(shardwright_wire::TorchContext {
            grad_mode,
            inference_mode,
            autocast,
            checkpointing: checkpointing.map(|(isolated, preserves_rng_state, group)| {
                Checkpointing {
                    isolated,
                    preserves_rng_state,
                    group,
                }
            }),
            hooks,
            device,
            settings: settings.collect::<PyResult<_>>()?,
            collector,
        }))
    }

    /// Whether it says nothing but whether gradients are enabled.
    #[getter]
    fn is_plain(&self) -> bool {
        self.0.is_plain()
    }

    /// Whether gradients are enabled.
    #[getter]
    fn grad_mode(&self) -> bool {
        self.0.grad_mode
    }

    /// Whether inference mode is on.
    #[getter]
    fn inference_mode(&self) -> bool {
        self.0.inference_mode
    }

    /// Enabled autocast states: device type, dtype, cache enabled.
    #[getter]
    fn autocast(&self) -> Vec<(String, String, bool)> {
        self.0.autocast.clone()
    }

    /// How the work is to be checkpointed: whether state changes once, whether random numbers are drawn again, and
    /// how many children of an `nn.Sequential` are one checkpoint (0 for all); None where it is not.
    #[getter]
    fn checkpointing(&self) -> Option<(bool, bool, u32)> {
        let how = self.0.checkpointing?;
        Some((how.isolated, how.preserves_rng_state, how.group))
    }

    /// Whether the module's hooks run.
    #[getter]
    fn hooks(&self) -> bool {
        self.0.hooks
    }

    /// The default device, where the task has set another one than the script.
    #[getter]
    fn device(&self) -> Option<String> {
        self.0.device.clone()
    }

    /// The settings that the task has changed.
    #[getter]
    fn settings(&self) -> Vec<(TorchSetting, Setting)> {
        let settings = self.0.settings.iter();
        settings
            .map(|(setting, value)| (TorchSetting::from_wire(*setting), value.clone().into()))
            .collect()
    }

    /// What `transformers` collects, by name; None where nothing is collected.
    #[getter]
    fn collector(&self) -> Option<Vec<(String, Collected)>> {
        let entries = self.0.collector.clone()?.into_iter();
        Some(entries.map(|(name, entry)| (name, entry.into())).collect())
    }
}

/// What a setting is set to.
#[derive(FromPyObject, IntoPyObject)]
pub(crate) enum Setting {
    Flag(bool),
    Name(String),
}

impl From<Setting> for SettingValue {
    fn from(value: Setting) -> Self {
        match value {
            Setting::Flag(flag) => Self::Flag(flag),
            Setting::Name(name) => Self::Name(name),
        }
    }
}

impl From<SettingValue> for Setting {
    fn from(value: SettingValue) -> Self {
        match value {
            SettingValue::Flag(flag) => Self::Flag(flag),
            SettingValue::Name(name) => Self::Name(name),
        }
    }
}

/// An entry of the collector of `transformers`.
#[derive(FromPyObject, IntoPyObject)]
pub(crate) enum Collected {
    Items(u32),
    Other(Spec),
}

impl From<Collected> for Collecting {
    fn from(entry: Collected) -> Self {
        match entry {
            Collected::Items(items) => Self::Items(items),
            Collected::Other(other) => Self::Other(other.0),
        }
    }
}

impl From<Collecting> for Collected {
    fn from(entry: Collecting) -> Self {
        match entry {
            Collecting::Items(items) => Self::Items(items),
            Collecting::Other(other) => Self::Other(Spec(other)),
        }
    }
}

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident $python:literal,)*) => {
        /// A setting that torch has once for the whole process, or for each thread.
        #[pyclass(frozen, eq, hash, from_py_object, module = "shardwright._core")]
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum TorchSetting {
            $($(#[$doc])* #[pyo3(name = $python)] $name,)*
        }

        impl TorchSetting {
            fn to_wire(self) -> shardwright_wire::TorchSetting {
                match self {
                    $(Self::$name => shardwright_wire::TorchSetting::$name,)*
                }
            }

            fn from_wire(setting: shardwright_wire::TorchSetting) -> Self {
                match setting {
                    $(shardwright_wire::TorchSetting::$name => Self::$name,)*
                }
            }
        }
    };
}

settings! {
    /// A dtype's name without `torch.`.
    DefaultDtype "DEFAULT_DTYPE",
    /// The precisions under all names that torch has for them, as one text.
    Precision "PRECISION",
    FlashAttention "FLASH_ATTENTION",
    MemoryEfficientAttention "MEMORY_EFFICIENT_ATTENTION",
    MathAttention "MATH_ATTENTION",
    CudnnAttention "CUDNN_ATTENTION",
    Deterministic "DETERMINISTIC",
    DeterministicWarnOnly "DETERMINISTIC_WARN_ONLY",
    Anomaly "ANOMALY",
    AnomalyCheckNan "ANOMALY_CHECK_NAN",
    Cudnn "CUDNN",
    CudnnBenchmark "CUDNN_BENCHMARK",
    CudnnDeterministic "CUDNN_DETERMINISTIC",
    Onednn "ONEDNN",
    EncoderFastPath "ENCODER_FAST_PATH",
    WarnAlways "WARN_ALWAYS",
    SparseInvariants "SPARSE_INVARIANTS",
    FillUninitialized "FILL_UNINITIALIZED",
    OverwriteConverted "OVERWRITE_CONVERTED",
    SwapConverted "SWAP_CONVERTED",
    AutocastCache "AUTOCAST_CACHE",
    BackwardThreads "BACKWARD_THREADS",
    ViewReplay "VIEW_REPLAY",
}
