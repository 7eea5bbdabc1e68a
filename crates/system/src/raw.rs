//! Tables of the functions of a C library that is found and loaded at run time.

/// Declares such a table and how it is filled: for each function its name here, its name in C, and its type.
#[macro_export]
macro_rules! functions {
    (
        $(#[$of_all:meta])*
        $visibility:vis struct $table:ident;
        $($(#[$doc:meta])* $name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
    ) => {
        $(#[$of_all])*
        $visibility struct $table {
            $($(#[$doc])* pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            /// # Safety
            /// `library` is one whose functions have the types declared here.
            pub(super) unsafe fn find(
                library: &$crate::raw::Library,
            ) -> Result<Self, $crate::raw::Error> {
                Ok(Self {
                    // SAFETY: upheld by the caller.
                    $($name: *unsafe { library.get($symbol) }?,)*
                })
            }
        }
    };
}

pub use libloading::{Error, os::unix::Library};

/// An error with its causes.
pub fn in_full(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", in_full(cause)),
        None => error.to_string(),
    }
}
