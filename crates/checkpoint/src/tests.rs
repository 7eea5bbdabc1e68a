//! Laws of checkpoints.

mod background;
mod division;
mod files;
mod full;
mod hostile;
mod leftovers;
mod lock;
mod manifests;
mod plans;
mod reshards;
mod torn;
