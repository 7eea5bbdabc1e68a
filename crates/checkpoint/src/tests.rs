//! Laws of checkpoints.

mod division;
mod files;
mod manifests;
mod plans;
mod torn;
