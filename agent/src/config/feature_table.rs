//! Every feature gate a node agent of Kubernetes 1.36 accepts: name, default, stage, whether it can still be changed, how far
//! its value counts here, and the gates it needs. Gates of other components are accepted too, because clusters set one list
//! everywhere. `HugepageAwareEviction` is of 1.37, whose default the agent follows.

use super::feature_gates::Effect;
use super::feature_gates::Stage;

/// The definition of one gate in 1.36.
#[derive(Debug)]
pub struct FeatureSpec {
    /// Its name in flags and documents.
    pub name: &'static str,
    /// Its value unless it is set.
    pub default: bool,
    /// Its stage.
    pub stage: Stage,
    /// Only the default is accepted.
    pub locked: bool,
    /// How far its value counts here.
    pub effect: Effect,
    /// Gates that must be on for this one to be on.
    pub needs: &'static [Feature],
}

macro_rules! gates {
    ($( $name:ident $default:ident $stage:ident $lock:ident $($effect:ident)? [$($needs:ident),*]; )*) => {
        /// A feature gate.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Feature {
            $( #[doc = concat!("`", stringify!($name), "`")] $name, )*
        }

        /// The gates in the order of [`Feature`].
        pub(super) const GATES: &[(Feature, FeatureSpec)] = &[
            $( (Feature::$name, FeatureSpec {
                name: stringify!($name),
                default: gates!(@default $default),
                stage: Stage::$stage,
                locked: gates!(@lock $lock),
                effect: gates!(@effect $($effect)?),
                needs: &[$(Feature::$needs),*],
            }), )*
        ];
    };
    (@default on) => { true };
    (@default off) => { false };
    (@lock locked) => { true };
    (@lock free) => { false };
    (@effect) => { Effect::DefaultOnly };
    (@effect read) => { Effect::Read };
    (@effect always) => { Effect::AlwaysOn };
    (@effect never) => { Effect::Never };
}

gates! {
    AggregatedDiscoveryRemoveBetaType on Deprecated locked [];
    AllowDNSOnlyNodeCSR off Deprecated free [];
    AllowInsecureKubeletCertificateSigningRequests off Deprecated free never [];
    AllowOverwriteTerminationGracePeriodSeconds off Deprecated locked [];
    AllowParsingUserUIDFromCertAuth on Beta free read [];
    AllowServiceExternalIPs on GA free never [];
    AllowUnsafeMalformedObjectDeletion off Alpha free never [];
    AnonymousAuthConfigurableEndpoints on GA locked [];
    AnyVolumeDataSource on GA locked [];
    APIResponseCompression on Beta free never [];
    APIServerIdentity on Beta free never [];
    APIServerTracing on GA locked [];
    APIServingWithRoutine off Alpha free never [];
    AtomicFIFO on Beta free [];
    AuthorizeNodeWithSelectors on GA locked [AuthorizeWithSelectors];
    AuthorizePodWebsocketUpgradeCreatePermission on Beta free never [];
    AuthorizeWithSelectors on GA locked [];
    BtreeWatchCache on GA locked [];
    CBORServingAndStorage off Alpha free [];
    ChangeContainerStatusOnKubeletRestart off Deprecated free [];
    ClearingNominatedNodeNameAfterBinding on Beta free [];
    ClientsAllowCARotation on Beta free [];
    ClientsAllowCBOR off Alpha free [];
    ClientsAllowTLSCacheGC on Beta free [];
    ClientsPreferCBOR off Alpha free [];
    CloudControllerManagerWatchBasedRoutesReconciliation off Alpha free never [];
    CloudControllerManagerWebhook off Alpha free never [];
    ClusterTrustBundle off Beta free always [];
    ClusterTrustBundleProjection off Beta free always [ClusterTrustBundle];
    ComponentFlagz on Beta free read [];
    ComponentStatusz on Beta free read [];
    ConcurrentWatchObjectDecode off Beta free never [];
    ConsistentListFromCache on GA locked [];
    ConstrainedImpersonation on Beta free never [];
    ContainerCheckpoint on Beta free read [];
    ContainerRestartRules on Beta free read [];
    ContainerStopSignals off Alpha free read [];
    ContextualLogging on Beta free [];
    CoordinatedLeaderElection off Beta free never [];
    CPUManagerPolicyAlphaOptions off Alpha free read [];
    CPUManagerPolicyBetaOptions on Beta free read [];
    CPUManagerPolicyOptions on GA locked [];
    CRDObservedGenerationTracking on Beta free never [];
    CRDValidationRatcheting on GA locked [];
    CRIListStreaming off Alpha free read [];
    CrossNamespaceVolumeDataSource off Alpha free never [];
    CSIServiceAccountTokenSecrets on GA locked [];
    CSIVolumeHealth off Alpha free [];
    CustomCPUCFSQuotaPeriod on GA free read [];
    CustomResourceFieldSelectors on GA locked [];
    DeclarativeValidation on GA locked [];
    DeclarativeValidationBeta on Beta free never [DeclarativeValidation];
    DeclarativeValidationTakeover off Deprecated free never [DeclarativeValidation];
    DeploymentReplicaSetTerminatingReplicas on Beta free never [];
    DetectCacheInconsistency on Beta free never [];
    DisableAllocatorDualWrite on GA locked [MultiCIDRServiceAllocator];
    DisableCPUQuotaWithExclusiveCPUs on Deprecated free [];
    DisableNodeKubeProxyVersion on Deprecated locked [];
    DRAAdminAccess on GA locked [DynamicResourceAllocation];
    DRAConsumableCapacity on Beta free [DynamicResourceAllocation];
    DRADeviceBindingConditions on Beta free [DRAResourceClaimDeviceStatus, DynamicResourceAllocation];
    DRADeviceTaintRules off Beta free never [DRADeviceTaints];
    DRADeviceTaints on Beta free [DynamicResourceAllocation];
    DRAExtendedResource on Beta free [DynamicResourceAllocation];
    DRAListTypeAttributes off Alpha free [DynamicResourceAllocation];
    DRANodeAllocatableResources off Alpha free [DynamicResourceAllocation];
    DRAPartitionableDevices on Beta free [DynamicResourceAllocation];
    DRAPrioritizedList on GA free [DynamicResourceAllocation];
    DRAResourceClaimDeviceStatus on Beta free never [];
    DRAResourceClaimGranularStatusAuthorization on Beta free never [DRAResourceClaimDeviceStatus, DynamicResourceAllocation];
    DRAResourcePoolStatus off Alpha free never [DynamicResourceAllocation];
    DRASchedulerFilterTimeout on Beta free never [DynamicResourceAllocation];
    DRAWorkloadResourceClaims off Alpha free [DynamicResourceAllocation, GenericWorkload];
    DynamicResourceAllocation on GA locked [];
    EnvFiles on Beta free read [];
    EventedPLEG off Alpha free always [];
    ExecProbeTimeout on GA locked [];
    ExtendWebSocketsToKubelet on Beta free read [NodeDeclaredFeatures];
    ExternalServiceAccountTokenSigner on GA locked [];
    GangScheduling off Alpha free never [GenericWorkload];
    GenericWorkload off Alpha free [];
    GitRepoVolumeDriver off Deprecated locked [];
    GracefulNodeShutdown on Beta free read [];
    GracefulNodeShutdownBasedOnPodPriority on Beta free read [GracefulNodeShutdown];
    HostnameOverride on Beta free read [];
    HPAConfigurableTolerance on Beta free never [];
    HPAScaleToZero off Alpha free never [];
    HugepageAwareEviction on Beta free [];
    ImageMaximumGCAge on GA locked [];
    ImageVolume on GA locked [];
    ImageVolumeWithDigest off Alpha free [ImageVolume];
    InformerResourceVersion on GA free [];
    InOrderInformers on GA locked [];
    InOrderInformersBatchProcess on Beta free [];
    InPlacePodLevelResourcesVerticalScaling on Beta free read [InPlacePodVerticalScaling, NodeDeclaredFeatures, PodLevelResources];
    InPlacePodVerticalScaling on GA locked [];
    InPlacePodVerticalScalingExclusiveCPUs off Alpha free read [InPlacePodVerticalScaling];
    InPlacePodVerticalScalingExclusiveMemory off Alpha free read [InPlacePodVerticalScaling];
    InPlacePodVerticalScalingInitContainers on Beta free read [InPlacePodVerticalScaling, NodeDeclaredFeatures];
    JobBackoffLimitPerIndex on GA locked [];
    JobManagedBy on GA locked [];
    JobPodReplacementPolicy on GA locked [];
    JobSuccessPolicy on GA locked [];
    KMSv1 off Deprecated free never [];
    KubeletCgroupDriverFromCRI on GA locked [];
    KubeletCrashLoopBackOffMax on Beta free read [];
    KubeletEnsureSecretPulledImages on Beta free read [];
    KubeletFineGrainedAuthz on GA locked [];
    KubeletInUserNamespace off Alpha free [];
    KubeletPodResourcesDynamicResources on GA locked [];
    KubeletPodResourcesGet on GA locked [];
    KubeletPodResourcesListUseActivePods on Deprecated free [];
    KubeletPSI on GA locked [];
    KubeletRegistrationGetOnExistsOnly off Deprecated free [];
    KubeletSeparateDiskGC on Beta free [];
    KubeletServiceAccountTokenForCredentialProviders on Beta free read [];
    KubeletTracing on GA locked [];
    ListFromCacheSnapshot on Beta free never [];
    LocalStorageCapacityIsolationFSQuotaMonitoring off Beta free read [];
    LogarithmicScaleDown on GA locked [];
    LoggingAlphaOptions off Alpha free read [];
    LoggingBetaOptions on Beta free read [];
    ManifestBasedAdmissionControlConfig off Alpha free never [];
    MatchLabelKeysInPodAffinity on GA locked [];
    MatchLabelKeysInPodTopologySpread on Beta free [];
    MatchLabelKeysInPodTopologySpreadSelectorMerge on Beta free [MatchLabelKeysInPodTopologySpread];
    MaxUnavailableStatefulSet off Beta free never [];
    // Of 1.37: with the defaults of its settings it protects and throttles nothing.
    MemoryQoS on Beta free read [];
    MultiCIDRServiceAllocator on GA locked [];
    MutableCSINodeAllocatableCount on GA locked [];
    MutablePodResourcesForSuspendedJobs on Beta free never [];
    MutablePVNodeAffinity off Alpha free [];
    MutableSchedulingDirectivesForSuspendedJobs on Beta free never [];
    MutatingAdmissionPolicy on GA free [];
    NativeHistograms off Alpha free [];
    NFTablesProxyMode on GA locked [];
    NodeDeclaredFeatures on Beta free read [];
    NodeInclusionPolicyInPodTopologySpread on GA locked [];
    NodeLogQuery on GA locked read [];
    NodeSwap on GA locked [];
    NominatedNodeNameForExpectation on Beta free never [];
    OpenAPIEnums on Beta free never [];
    OpportunisticBatching on Beta free never [];
    OrderedNamespaceDeletion on GA locked [];
    PersistentVolumeClaimUnusedSinceTime off Alpha free never [];
    PLEGOnDemandRelist on Beta free [];
    PodAndContainerStatsFromCRI off Alpha free [];
    PodCertificateRequest off Beta free always [AuthorizeNodeWithSelectors];
    PodDeletionCost on Beta free [];
    PodLevelResourceManagers off Alpha free [PodLevelResources];
    PodLevelResources on Beta free read [];
    PodLifecycleSleepAction on GA locked [];
    PodLifecycleSleepActionAllowZero on GA locked [PodLifecycleSleepAction];
    PodLogsQuerySplitStreams off Alpha free read [];
    PodObservedGenerationTracking on GA locked [];
    PodReadyToStartContainersCondition on Beta free [];
    PodsAPI off Alpha free [];
    PodSchedulingReadiness on GA locked [];
    PodTopologyLabelsAdmission on Beta free never [];
    PortForwardWebsockets on Beta free [];
    PreferSameTrafficDistribution on GA locked [];
    PreventStaticPodAPIReferences on Beta free read [];
    ProcMountType on GA locked [UserNamespacesSupport];
    QOSReserved off Alpha free read [];
    RecoverVolumeExpansionFailure on GA locked [];
    RecursiveReadOnlyMounts on GA locked [];
    ReduceDefaultCrashLoopBackOffDecay off Alpha free [];
    RelaxedDNSSearchValidation on GA locked [];
    RelaxedEnvironmentVariableValidation on GA locked [];
    RelaxedServiceNameValidation on Beta free [];
    ReloadKubeletClientCAFile on Beta free read [];
    ReloadKubeletServerCertificateFile on Beta free read [];
    RemoteRequestHeaderUID on Beta free never [];
    ResilientWatchCacheInitialization on GA locked [];
    ResourceHealthStatus on Beta free [DynamicResourceAllocation];
    ResourceHealthStatusMessage on Beta free [ResourceHealthStatus];
    RestartAllContainersOnContainerExits on Beta free read [ContainerRestartRules, NodeDeclaredFeatures];
    RetryGenerateName on GA locked [];
    RotateKubeletServerCertificate on Beta free read [];
    RuntimeClassInImageCriApi off Alpha free never [];
    SchedulerAsyncAPICalls off Beta free never [];
    SchedulerAsyncPreemption on Beta free never [];
    SchedulerPopFromBackoffQ on Beta free never [];
    SchedulerQueueingHints on GA locked [];
    SELinuxChangePolicy on GA locked [];
    SELinuxMount off Beta free [];
    SELinuxMountReadWriteOncePod on GA locked [];
    SeparateCacheWatchRPC off Deprecated locked [];
    SeparateTaintEvictionController on GA locked [];
    ServiceAccountNodeAudienceRestriction on Beta free never [];
    ServiceAccountTokenJTI on GA locked [];
    ServiceAccountTokenNodeBinding on GA locked [ServiceAccountTokenNodeBindingValidation];
    ServiceAccountTokenNodeBindingValidation on GA locked [];
    ServiceAccountTokenPodNodeInfo on GA locked [];
    ServiceCIDRStatusFieldWiping on Deprecated free never [];
    ShardedListAndWatch off Alpha free never [];
    SidecarContainers on GA locked [];
    SizeBasedListCostEstimate on Beta free never [];
    StaleControllerConsistencyDaemonSet on Beta free never [AtomicFIFO];
    StaleControllerConsistencyJob on Beta free never [AtomicFIFO];
    StaleControllerConsistencyReplicaSet on Beta free never [AtomicFIFO];
    StaleControllerConsistencyStatefulSet on Beta free never [AtomicFIFO];
    StatefulSetSemanticRevisionComparison on Beta free never [];
    StorageCapacityScoring off Alpha free never [];
    StorageNamespaceIndex on Deprecated free never [];
    StorageVersionAPI off Alpha free never [APIServerIdentity];
    StorageVersionHash on Beta free never [];
    StorageVersionMigrator off Beta free never [];
    StreamingCollectionEncodingToJSON on GA locked [];
    StreamingCollectionEncodingToProtobuf on GA locked [];
    StrictIPCIDRValidation on Beta free [];
    StructuredAuthenticationConfiguration on GA locked [];
    StructuredAuthenticationConfigurationEgressSelector on Beta free never [StructuredAuthenticationConfiguration];
    StructuredAuthenticationConfigurationJWKSMetrics on Beta free never [StructuredAuthenticationConfiguration];
    SupplementalGroupsPolicy on GA locked [];
    SystemdWatchdog on GA locked [];
    TaintTolerationComparisonOperators off Alpha free [];
    TokenRequestServiceAccountUIDValidation on Beta free never [];
    TopologyAwareWorkloadScheduling off Alpha free never [GenericWorkload];
    TopologyManagerPolicyAlphaOptions off Alpha free [];
    TopologyManagerPolicyBetaOptions on Beta free [];
    TopologyManagerPolicyOptions on GA locked [];
    TranslateStreamCloseWebsocketRequests on Beta free [];
    UnauthenticatedHTTP2DOSMitigation on Beta free never [];
    UnknownVersionInteroperabilityProxy on Beta free never [APIServerIdentity];
    UnlockWhileProcessingFIFO on Beta free [];
    UserNamespacesHostNetworkSupport off Alpha free [NodeDeclaredFeatures, UserNamespacesSupport];
    UserNamespacesSupport on GA locked [];
    VolumeAttributesClass on GA locked [];
    VolumeLimitScaling off Alpha free never [];
    WatchCacheInitializationPostStartHook on Beta free never [];
    WatchList on Beta free [];
    WatchListClient on Beta free [];
    WindowsCPUAndMemoryAffinity off Alpha free never [];
    WindowsGracefulNodeShutdown on Beta free never [GracefulNodeShutdown];
    WindowsHostNetwork off Deprecated free never [];
    WinDSR on GA locked [];
    WinOverlay on GA locked [];
    WorkloadAwarePreemption off Alpha free never [GangScheduling];
    WorkloadWithJob off Alpha free never [GenericWorkload];
}
