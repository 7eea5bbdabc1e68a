//! What only PyTorch means: the state under which a module runs.

use crate::value::Value;

/// The torch state of a forward request. Everything that a request says which only PyTorch can mean stands here; the
/// default is the state of a fresh process.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchContext {
    /// `torch.is_grad_enabled()`.
    pub grad_mode: bool,
    /// `torch.is_inference_mode_enabled()`.
    pub inference_mode: bool,
    /// Enabled autocast states: device type, dtype, cache enabled.
    pub autocast: Vec<(String, String, bool)>,
    /// How the work is to be checkpointed; `None` where it is not.
    pub checkpointing: Option<Checkpointing>,
    /// Whether the module's hooks run; false where the script calls its `forward` itself.
    pub hooks: bool,
    /// The default device, where the task has set another one than the script.
    pub device: Option<String>,
    /// Settings that the task has changed.
    pub settings: Vec<(TorchSetting, SettingValue)>,
    /// What `transformers` collects beside results, by name; `None` where nothing is collected.
    pub collector: Option<Vec<(String, Collecting)>>,
}

impl TorchContext {
    /// Whether it says nothing but whether gradients are enabled.
    pub fn is_plain(&self) -> bool {
        self.hooks
            && !self.inference_mode
            && self.checkpointing.is_none()
            && self.autocast.is_empty()
            && self.device.is_none()
            && self.settings.is_empty()
            && self.collector.is_none()
    }
}

impl Default for TorchContext {
    fn default() -> Self {
        Self {
            grad_mode: true,
            inference_mode: false,
            autocast: Vec::new(),
            checkpointing: None,
            hooks: true,
            device: None,
            settings: Vec::new(),
            collector: None,
        }
    }
}

/// How modules are checkpointed, which the backward computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checkpointing {
    /// Whether what modules keep changes in the first computation only, as without a checkpoint.
    pub isolated: bool,
    /// Whether the second computation draws the random numbers of the first.
    pub preserves_rng_state: bool,
    /// How many consecutive children of an `nn.Sequential` are one checkpoint; 0 for all.
    pub group: u32,
}

/// An entry of the collector of `transformers`.
#[derive(Clone, Debug, PartialEq)]
pub enum Collecting {
    /// A list to be added to, which has so many items.
    Items(u32),
    /// Something else, without tensors.
    Other(Value),
}

/// What a setting is set to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingValue {
    /// On or off.
    Flag(bool),
    /// A name: of a dtype without the `torch.` prefix, or of precisions.
    Name(String),
}

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident $text:literal,)*) => {
        /// A setting that torch has once for the whole process, or for each thread.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum TorchSetting {
            $($(#[$doc])* $name,)*
        }

        impl TorchSetting {
            /// All of them, in the order of their numbers in messages.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its name, for reports.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

settings! {
    /// `torch.get_default_dtype()`: a name.
    DefaultDtype "default dtype",
    /// The precisions of products and convolutions of `float32`: a text.
    Precision "precisions of float32",
    /// Attention by flash attention.
    FlashAttention "flash attention",
    /// Attention that saves memory.
    MemoryEfficientAttention "memory-efficient attention",
    /// Attention by its formula.
    MathAttention "mathematical attention",
    /// Attention by cuDNN.
    CudnnAttention "cuDNN attention",
    /// `torch.use_deterministic_algorithms`.
    Deterministic "deterministic algorithms",
    /// Whether that only warns.
    DeterministicWarnOnly "deterministic algorithms' warnings",
    /// Anomaly detection.
    Anomaly "anomaly detection",
    /// Whether that looks for NaN.
    AnomalyCheckNan "anomaly detection's check for NaN",
    /// cuDNN.
    Cudnn "cuDNN",
    /// Whether cuDNN tries its algorithms.
    CudnnBenchmark "cuDNN benchmark",
    /// Whether cuDNN's algorithms are deterministic.
    CudnnDeterministic "cuDNN determinism",
    /// oneDNN.
    Onednn "oneDNN",
    /// The fast path of `nn.TransformerEncoder`.
    EncoderFastPath "fast path of encoders",
    /// Whether warnings are repeated.
    WarnAlways "repeated warnings",
    /// Checks of sparse tensors' invariants.
    SparseInvariants "checks of sparse tensors",
    /// Whether new memory is filled where algorithms are deterministic.
    FillUninitialized "filling of new memory",
    /// Whether a conversion of a module overwrites its parameters.
    OverwriteConverted "overwriting of converted parameters",
    /// Whether a conversion of a module swaps its parameters.
    SwapConverted "swapping of converted parameters",
    /// Whether autocast keeps casts; each thread's own.
    AutocastCache "autocast's cache",
    /// Whether backward uses threads; each thread's own.
    BackwardThreads "threads of the backward",
    /// Whether views are replayed; each thread's own.
    ViewReplay "replayed views",
}

impl TorchSetting {
    /// Whether it is set to a name; else it is a flag.
    pub fn is_name(self) -> bool {
        matches!(self, Self::DefaultDtype | Self::Precision)
    }

    /// Whether it can be set to this.
    pub fn takes(self, value: &SettingValue) -> bool {
        self.is_name() == matches!(value, SettingValue::Name(_))
    }
}
