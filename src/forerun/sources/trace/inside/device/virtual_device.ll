; The functions behind a virtual CUDA device, as LLVM IR. `machine.py` fills in the names that begin with a dollar sign
; and compiles it. A function named guard_X or hooks_X replaces the virtual function X of torch's device guard
; (c10/core/impl/DeviceGuardImplInterface.h) or of its CUDA hooks (ATen/detail/CUDAHooksInterface.h).
;
; A thread keeps its stream (all bits but the lowest 8) and its device (the lowest 8 bits) in one word.

target triple = "$triple"
declare i8* @pthread_getspecific($key_type)
declare i32 @pthread_setspecific($key_type, i8*)
declare void @create_cpu_generator(i8* sret(i8), i64)
declare i8* @cpu_allocator()

@next_stream = global i64 1

define i64 @word() {
  %p = call i8* @pthread_getspecific($key_type $key)
  %w = ptrtoint i8* %p to i64
  ret i64 %w
}
define void @set_word(i64 %w) {
  %p = inttoptr i64 %w to i8*
  %r = call i32 @pthread_setspecific($key_type $key, i8* %p)
  ret void
}
define i64 @index() {
  %w = call i64 @word()
  %i = and i64 %w, 255
  ret i64 %i
}
define void @set_index(i64 %i) {
  %w = call i64 @word()
  %stream = and i64 %w, -256
  %low = and i64 %i, 255
  %new = or i64 %stream, %low
  call void @set_word(i64 %new)
  ret void
}
define i64 @stream() {
  %w = call i64 @word()
  %s = lshr i64 %w, 8
  ret i64 %s
}
define void @set_stream(i64 %s) {
  %i = call i64 @index()
  %high = shl i64 %s, 8
  %new = or i64 %high, %i
  call void @set_word(i64 %new)
  ret void
}
define i16 @device_of(i64 %i) {
  %t = trunc i64 %i to i16
  %h = shl i16 %t, 8
  %d = or i16 %h, $cuda
  ret i16 %d
}
define i64 @index_of(i16 %d) {
  %h = lshr i16 %d, 8
  %i = zext i16 %h to i64
  ret i64 %i
}
define {i64, i64} @make_stream(i64 %id) {
  %i = call i64 @index()
  %d = call i16 @device_of(i64 %i)
  %w = zext i16 %d to i64
  %a = insertvalue {i64, i64} undef, i64 %w, 0
  %b = insertvalue {i64, i64} %a, i64 %id, 1
  ret {i64, i64} %b
}
define i64 @fresh_stream() {
  %s = atomicrmw add i64* @next_stream, i64 1 seq_cst
  ret i64 %s
}

define zeroext i8 @guard_type(i8* %this) { ret i8 $cuda }
define i16 @guard_exchangeDevice(i8* %this, i16 %d) {
  %old = call i64 @index()
  %i = call i64 @index_of(i16 %d)
  call void @set_index(i64 %i)
  %r = call i16 @device_of(i64 %old)
  ret i16 %r
}
define i16 @guard_getDevice(i8* %this) {
  %i = call i64 @index()
  %r = call i16 @device_of(i64 %i)
  ret i16 %r
}
define void @guard_setDevice(i8* %this, i16 %d) {
  %i = call i64 @index_of(i16 %d)
  call void @set_index(i64 %i)
  ret void
}
define void @guard_uncheckedSetDevice(i8* %this, i16 %d) {
  call void @guard_setDevice(i8* %this, i16 %d)
  ret void
}
define {i64, i64} @guard_getStream(i8* %this, i16 %d) {
  %s = call i64 @stream()
  %r = call {i64, i64} @make_stream(i64 %s)
  ret {i64, i64} %r
}
define {i64, i64} @guard_getDefaultStream(i8* %this, i16 %d) {
  %r = call {i64, i64} @make_stream(i64 0)
  ret {i64, i64} %r
}
define {i64, i64} @guard_getStreamFromGlobalPool(i8* %this, i16 %d, i8 %high) {
  %s = call i64 @fresh_stream()
  %r = call {i64, i64} @make_stream(i64 %s)
  ret {i64, i64} %r
}
define {i64, i64} @guard_getNewStream(i8* %this, i16 %d, i32 %priority) {
  %s = call i64 @fresh_stream()
  %r = call {i64, i64} @make_stream(i64 %s)
  ret {i64, i64} %r
}
define {i64, i64} @guard_exchangeStream(i8* %this, i64 %device, i64 %id) {
  %old = call i64 @stream()
  call void @set_stream(i64 %id)
  %r = call {i64, i64} @make_stream(i64 %old)
  ret {i64, i64} %r
}
define i8* @guard_getStreamNativeHandle(i8* %this, i64 %device, i64 %id) {
  %p = inttoptr i64 %id to i8*
  ret i8* %p
}
define void @guard_destroyEvent(i8* %this, i8* %event, i8 %index) { ret void }
define i64 @stream_at(i8* %stream) {
  %q = bitcast i8* %stream to i64*
  %at = getelementptr i64, i64* %q, i64 1
  %id = load i64, i64* %at
  ret i64 %id
}
define void @guard_record(i8* %this, i8** %event, i8* %stream, i8 %index, i32 %flag) {
  %id = call i64 @stream_at(i8* %stream)
  %f = inttoptr i64 $on_record to i64 (i64)*
  %e = call i64 %f(i64 %id)
  %p = inttoptr i64 %e to i8*
  store i8* %p, i8** %event
  ret void
}
define void @guard_block(i8* %this, i8* %event, i8* %stream) {
  %id = call i64 @stream_at(i8* %stream)
  %e = ptrtoint i8* %event to i64
  %f = inttoptr i64 $on_block to i64 (i64, i64)*
  %r = call i64 %f(i64 %e, i64 %id)
  ret void
}
define zeroext i8 @guard_queryEvent(i8* %this, i8* %event) { ret i8 1 }
define zeroext i8 @guard_queryStream(i8* %this, i8* %stream) { ret i8 1 }
define zeroext i8 @guard_isStreamCapturing(i8* %this, i8* %stream) { ret i8 0 }
define signext i8 @guard_deviceCount(i8* %this) { ret i8 $count }
define void @guard_synchronizeStream(i8* %this, i8* %stream) {
  call void @sync()
  ret void
}
define void @guard_synchronizeEvent(i8* %this, i8* %event) {
  call void @sync()
  ret void
}
define void @guard_synchronizeDevice(i8* %this, i8 %index) {
  call void @sync()
  ret void
}
define void @sync() {
  %f = inttoptr i64 $on_sync to i64 ()*
  %r = call i64 %f()
  ret void
}
define void @guard_recordDataPtrOnStream(i8* %this, i8* %data, i8* %stream) { ret void }

define zeroext i8 @hooks_hasCUDA(i8* %this) { ret i8 1 }
define zeroext i8 @hooks_isBuilt(i8* %this) { ret i8 1 }
define zeroext i8 @hooks_isAvailable(i8* %this) { ret i8 1 }
define zeroext i8 @hooks_hasPrimaryContext(i8* %this, i8 %index) { ret i8 1 }
define zeroext i8 @hooks_isPinnedPtr(i8* %this, i8* %data) { ret i8 1 }
define void @hooks_init(i8* %this) { ret void }
define void @hooks_deviceSynchronize(i8* %this, i8 %index) {
  call void @sync()
  ret void
}
define i32 @hooks_getNumGPUs(i8* %this) { ret i32 $count }
define signext i8 @hooks_deviceCount(i8* %this) { ret i8 $count }
define signext i8 @hooks_current_device(i8* %this) {
  %i = call i64 @index()
  %r = trunc i64 %i to i8
  ret i8 %r
}
define signext i8 @hooks_getCurrentDevice(i8* %this) {
  %r = call i8 @hooks_current_device(i8* %this)
  ret i8 %r
}
define void @hooks_setCurrentDevice(i8* %this, i8 %index) {
  %i = zext i8 %index to i64
  call void @set_index(i64 %i)
  ret void
}
define signext i8 @hooks_exchangeDevice(i8* %this, i8 %index) {
  %old = call i8 @hooks_current_device(i8* %this)
  call void @hooks_setCurrentDevice(i8* %this, i8 %index)
  ret i8 %old
}
define signext i8 @hooks_maybeExchangeDevice(i8* %this, i8 %index) {
  %old = call i8 @hooks_exchangeDevice(i8* %this, i8 %index)
  ret i8 %old
}
define i8* @hooks_getPinnedMemoryAllocator(i8* %this) {
  %a = call i8* @cpu_allocator()
  ret i8* %a
}
define void @hooks_getNewGenerator(i8* sret(i8) %out, i8* %this, i8 %index) {
  call void @create_cpu_generator(i8* sret(i8) %out, i64 67280421310721)
  ret void
}
