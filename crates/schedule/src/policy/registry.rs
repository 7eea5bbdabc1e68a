//! The policies by their names. Each is a file beside this one, and a line here.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::{Rules, interleaved};
use crate::list::RootOrder;
use crate::program::Program;

/// The variant of a policy, its field if it bounds the microbatches in flight, and its file.
macro_rules! policies {
    ($($(#[$of_policy:meta])* $variant:ident $({ $active:ident })? = $file:ident;)*) => {
        /// A pipeline schedule. Its text form is the name of a policy, as `simple` or `interleaved(active=4)`,
        /// `list(0F 1F 0B 1B)`, or the text of a program.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Schedule {
            $(
                $(#[$of_policy])*
                $variant $({
                    /// How many microbatches may be in flight, or wait for their weight gradients, at once.
                    $active: NonZeroU32,
                })?,
            )*
            /// The root starts forwards and backwards in this order; everything else goes by the order of
            /// `Interleaved`.
            List(Arc<RootOrder>),
            /// Every rank goes by its part of a program. This type only knows the order of what a program does not
            /// name, which is that of `Interleaved`; who follows a program knows which item is which action.
            Program(Arc<Program>),
        }

        impl Schedule {
            /// A policy's rules, and how many microbatches it lets be in flight; 0 where it does not bound them.
            pub(crate) fn rules(&self) -> (&'static dyn Rules, u32) {
                match self {
                    $(Self::$variant $({ $active })? => (&super::$file::Policy, 0 $(+ $active.get())?),)*
                    Self::List(_) | Self::Program(_) => (&interleaved::Policy, 0),
                }
            }

            /// How many microbatches may be in flight at once; `None` where the schedule does not bound them.
            pub fn active(&self) -> Option<NonZeroU32> {
                NonZeroU32::new(self.rules().1)
            }

            /// The policy of a name, with so many microbatches in flight if it bounds them.
            pub fn of_name(name: &str, active: NonZeroU32) -> Option<Self> {
                $(if name == stringify!($file) {
                    return Some(Self::$variant $({ $active: active })?);
                })*
                None
            }

            /// The text forms of all policies, for messages.
            pub(super) fn forms() -> String {
                let forms = [$(concat!("`", stringify!($file) $(, "(", stringify!($active), "=N)")?, "`")),*];
                forms.join(", ")
            }

            /// The policy of a text form: its name, and the number of microbatches in flight where it bounds them.
            pub(super) fn of_text(name: &str, active: Option<NonZeroU32>) -> Option<Self> {
                let found = Self::of_name(name, active.unwrap_or(NonZeroU32::MIN))?;
                (active.is_some() == found.active().is_some()).then_some(found)
            }
        }

        impl fmt::Display for Schedule {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant $({ $active })? => {
                        formatter.write_str(stringify!($file))?;
                        $(write!(formatter, "(active={})", $active)?;)?
                        Ok(())
                    })*
                    Self::List(order) => write!(formatter, "{order}"),
                    Self::Program(program) => write!(formatter, "{program}"),
                }
            }
        }
    };
}

policies! {
    /// The forward of every microbatch before the backward of any.
    Simple = simple;
    /// A ready backward first, else the next forward.
    Interleaved { active } = interleaved;
    /// For several parts of the model on one rank: forward and backward alternate.
    Looped { active } = looped;
    /// As `Interleaved`, with each backward split into input gradients and weight gradients.
    ZeroBubble { active } = zero_bubble;
}
