//! Credential plugins (KEP-2133): programs that return credentials for images, with a token of the pod's service account if
//! they ask for one (KEP-4412).
//!
//! ```text
//!  every plugin with a pattern for the image ─▶ account: token, annotations ─▶ cache ─▶ one run for all that wait
//!      └─▶ responses of all as one keyring
//! ```

mod account;
mod cache;
mod config;
mod plugin;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::Pod;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use tokio::sync::OnceCell;
use tokio::time::Instant;

pub use config::ProviderConfigError;

use super::Credential;
use super::docker_config::Login;
use super::keyring::Keyring;
use super::keyring::matches;
use crate::images::access::CredentialSource;
use crate::images::access::lower_hex;
use crate::metrics::Metrics;
use crate::objects::Objects;
use account::Account;
use cache::AccountKey;
use cache::Cache;
use config::ProviderConfig;
use plugin::CredentialProviderRequest;
use plugin::CredentialProviderResponse;
use plugin::PluginError;
use sha2::Digest as _;

/// The configured plugins.
#[derive(Debug)]
pub struct Providers {
    all: Vec<Provider>,
    objects: Objects,
    metrics: Arc<Metrics>,
}

/// One plugin, with its responses.
#[derive(Debug)]
struct Provider {
    config: ProviderConfig,
    program: PathBuf,
    cache: Mutex<Cache>,
    /// Runs in progress; all callers with the same request wait for one.
    running: Mutex<HashMap<(String, AccountKey), Run>>,
}

type Run = Arc<OnceCell<Result<Arc<CredentialProviderResponse>, PluginError>>>;

impl Providers {
    /// Reads the configuration of plugins in `directory`. `tokens`: they may get tokens of service accounts (feature gate
    /// `KubeletServiceAccountTokenForCredentialProviders`), which are read from `objects`. Blocks.
    ///
    /// # Errors
    /// The configuration is invalid, or a program is missing.
    pub fn read(
        config: &Path,
        directory: &Path,
        tokens: bool,
        objects: Objects,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ProviderConfigError> {
        let read = config::read(config, directory, tokens)?;
        metrics.images.set_plugin_config(&read.hash);
        let provider = |config: ProviderConfig| Provider {
            program: directory.join(&config.name),
            config,
            cache: Mutex::default(),
            running: Mutex::default(),
        };
        Ok(Self { all: read.providers.into_iter().map(provider).collect(), objects, metrics })
    }

    /// The entries for a repository, of all plugins that have a pattern for it. One that fails gives none.
    pub(super) async fn matching(&self, repository: &str, pod: &Pod) -> Vec<Credential> {
        let mut keyring = Keyring::default();
        for provider in &self.all {
            if !provider.config.match_images.iter().any(|pattern| matches(pattern, repository)) {
                continue;
            }
            match self.ask(provider, repository, pod).await {
                Ok(answer) => answer.into_iter().for_each(|(registry, credential)| keyring.add(&registry, credential)),
                Err(error) => {
                    let plugin = &provider.config.name;
                    tracing::warn!(plugin, repository, error, "a credential plugin gave no credentials");
                }
            }
        }
        keyring.matching(repository).into_iter().cloned().collect()
    }

    /// Entries of one plugin; none if the pod's service account is not for it.
    async fn ask(&self, provider: &Provider, image: &str, pod: &Pod) -> Result<Vec<(String, Credential)>, String> {
        let account = match &provider.config.token_attributes {
            Some(attributes) => match account::find(attributes, pod, &self.objects).await? {
                Some(account) => account,
                None => return Ok(Vec::new()),
            },
            None => Account::default(),
        };
        let response = provider.response(image, &account, &self.metrics).await.map_err(|error| error.to_string())?;
        let source = account.account.map_or(CredentialSource::Node, CredentialSource::ServiceAccount);
        let entry = |(registry, username, password): &(String, String, SecretString)| {
            let login = Login::new(username.clone(), password.clone());
            (registry.clone(), Credential { login, source: source.clone() })
        };
        Ok(response.auth.iter().map(entry).collect())
    }
}

impl Provider {
    /// The cached response, or that of a run.
    async fn response(
        &self,
        image: &str,
        account: &Account,
        metrics: &Metrics,
    ) -> Result<Arc<CredentialProviderResponse>, PluginError> {
        let hash = account.token.as_ref().map(hash);
        let by_token = self.config.token_attributes.as_ref().is_some_and(|attributes| attributes.cache_type == "Token");
        let key = AccountKey {
            account: account.account.clone(),
            annotations: account.annotations.clone(),
            token: hash.clone().filter(|_| by_token),
        };
        if let Some(known) = lock(&self.cache).get(image, &key, Instant::now()) {
            return Ok(known);
        }
        let run_key = (image.to_owned(), AccountKey { token: hash, ..key.clone() });
        let run = {
            let mut running = lock(&self.running);
            // Callers that were dropped, with their pods, have removed nothing.
            running.retain(|_, run| Arc::strong_count(run) > 1);
            running.entry(run_key.clone()).or_default().clone()
        };
        let result = run.get_or_init(|| self.run(image, account, key, metrics)).await.clone();
        let mut running = lock(&self.running);
        if running.get(&run_key).is_some_and(|current| Arc::ptr_eq(current, &run)) {
            running.remove(&run_key);
        }
        result
    }

    async fn run(
        &self,
        image: &str,
        account: &Account,
        key: AccountKey,
        metrics: &Metrics,
    ) -> Result<Arc<CredentialProviderResponse>, PluginError> {
        let request =
            CredentialProviderRequest { image, token: account.token.as_ref(), annotations: &account.annotations };
        let began = Instant::now();
        let result = plugin::run(&self.config, &self.program, &request).await;
        let failed = result.as_ref().is_err_and(PluginError::is_exec);
        metrics.images.plugin_ran(&self.config.name, began.elapsed(), !failed);
        let response = Arc::new(result?);
        if key.token.is_none() && account.token.as_ref().is_some_and(|token| response.has_password(token)) {
            return Err(PluginError::Echo);
        }
        let lifetime = response.lifetime.unwrap_or_else(|| self.config.lifetime());
        let until = Instant::now().checked_add(lifetime).filter(|_| !lifetime.is_zero());
        if let Some(until) = until {
            lock(&self.cache).insert(image, key, until, response.clone());
        }
        Ok(response)
    }
}

impl CredentialProviderResponse {
    fn has_password(&self, token: &SecretString) -> bool {
        self.auth.iter().any(|(_, _, password)| password.expose_secret() == token.expose_secret())
    }
}

fn hash(token: &SecretString) -> String {
    lower_hex(&sha2::Sha256::digest(token.expose_secret()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Entries are replaced whole: a panic elsewhere leaves a usable map behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
